"""CUDA-only ways to create tensors: storages, legacy constructors such as `torch.cuda.FloatTensor`, and `comm`.

Not modelled: tensors shared between processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches


def install(cards: Cards, patches: Patches) -> None:
    # Legacy constructors such as `torch.cuda.FloatTensor`
    for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
        legacy: Any = getattr(torch.cuda, name)
        body = {"plain": legacy, "dtype": legacy.dtype, "layout": legacy.layout, "is_cuda": True, "is_sparse": False}
        # Tensor.type() uses the whole name.
        patches.set(torch.cuda, name, _Constructor(f"torch.cuda.{name}", (), body))
    plain_default = torch._C._set_default_tensor_type

    # `torch.Tensor(...)` makes tensors of the default type; subclasses of it make their own.
    plain_new = torch.Tensor.__new__
    default: list[_Constructor] = []

    def new_tensor(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        if default and cls is torch.Tensor and "device" not in keywords:
            return default[0](*arguments, **keywords)
        return plain_new(cls, *arguments, **keywords)

    def reset_default() -> None:
        default.clear()
        torch.set_default_device(None)

    def set_default(kind: Any) -> None:
        if isinstance(kind, _Constructor):
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device("cuda")
            if torch.Tensor.__new__ is plain_new:
                patches.set(torch.Tensor, "__new__", staticmethod(new_tensor))
            default[:] = [kind]
            patches.on_undo(reset_default)
        else:
            plain_default(kind)
            reset_default()

    patches.set(torch._C, "_set_default_tensor_type", set_default)
    moves = {"scatter": scatter, "gather": gather, "broadcast": broadcast, "broadcast_coalesced": broadcast_coalesced}
    patches.set_all(torch._C, {f"_{name}": function for name, function in moves.items()})
    # Storages: `torch.UntypedStorage(size, device="cuda")`, used by copies, saving and loading
    untyped: Any = torch.UntypedStorage
    plain, plain_resize = untyped.__new__, untyped.resize_

    def new(cls: Any, *arguments: Any, device: Any = None, **keywords: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *arguments, device=device, **keywords)
        size = arguments[0] if arguments else 0
        return torch.empty(int(size), dtype=torch.uint8, device=device).untyped_storage()

    def resize(storage: Any, size: int) -> Any:
        """Resize a storage, as FSDP does to free and reallocate unsharded parameters."""
        if storage.device.type != "cuda":
            return plain_resize(storage, size)
        torch.ops.tonnage.resize_storage(storage, size)
        return storage

    patches.set_all(torch.UntypedStorage, {"__new__": staticmethod(new), "resize_": resize})


class _Constructor(type):
    """A legacy tensor class: calling it makes a tensor, and `isinstance` recognizes its tensors."""

    dtype: torch.dtype
    plain: type

    def __call__(cls, *arguments: Any, **keywords: Any) -> Tensor:
        return torch.empty(0, dtype=cls.dtype, device="cuda").new(*arguments, **keywords)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)


# `torch.nn.parallel.comm` uses the functions below.


def scatter(
    tensor: Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None = None, dim: int = 0, streams: Any = None
) -> list[Tensor]:
    """Return chunks of a tensor, one on each card."""
    pieces = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return [piece.to(f"cuda:{index}", non_blocking=True) for piece, index in zip(pieces, devices, strict=False)]


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """Concatenate tensors on a card or, for -1, on the host."""
    where = "cpu" if destination == -1 else f"cuda:{destination or 0}"
    return torch.cat([tensor.to(where, non_blocking=True) for tensor in tensors], dim)


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    """Return a copy on each card; the tensor itself where it is already."""
    return [tensor.to(f"cuda:{index}", non_blocking=True) for index in devices]


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Return copies of several tensors on each card."""
    return [[broadcast(tensor, [index])[0] for tensor in tensors] for index in devices]

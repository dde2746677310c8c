"""What the multi-tensor kernels of optimizers and gradient clipping allocate beside their outputs."""

from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain

_CHUNK = 65536  # elements that one block of a multi-tensor kernel works on

_POW_SCALAR = plain(torch.ops.aten.pow.Scalar)


@kernel("_foreach_norm.Scalar")
def foreach_norm(self: list[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Norms of the chunks first, then one result for each tensor."""
    if not _is_fast(self, ord):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in self]
    first = self[0]
    parts = torch.empty(len(self) * chunks(self), dtype=_accumulated(dtype or first.dtype), device=first.device)
    outputs = [torch.empty((), dtype=dtype or t.dtype, device=t.device) for t in self]
    del parts
    return outputs


@kernel("_foreach_max")
def foreach_max(self: list[Any]) -> list[Any]:
    """One result for each tensor, then the largest of each chunk."""
    if not _is_fast(self, 2):
        return [t.max() for t in self]
    outputs = [torch.empty((), dtype=t.dtype, device=t.device) for t in self]
    parts = torch.empty(len(self) * chunks(self), dtype=self[0].dtype, device=self[0].device)
    del parts
    return outputs


def chunks(tensors: list[Any]) -> int:
    """Of the largest tensor."""
    return max(-(-t.numel() // _CHUNK) for t in tensors)


def _is_fast(tensors: list[Any], order: Any) -> bool:
    first = tensors[0]
    return (
        float(order) in (1.0, 2.0, float("inf"))
        and first.dtype.is_floating_point
        and all(t.dtype == first.dtype and t.device == first.device and t.numel() and _is_dense(t) for t in tensors)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@kernel("pow.Scalar")
def pow_scalar(self: Any, exponent: torch.Tensor) -> torch.Tensor:
    """The base becomes a number on the device, unless it is one."""
    result: torch.Tensor = _POW_SCALAR(self, exponent)
    if complex(self) != 1:
        base = torch.empty((), dtype=_number_type(self), device=exponent.device)
        del base
    return result


def _number_type(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.float64 if isinstance(number, float) else torch.complex128

"""Temporary memory of the multi-tensor kernels of optimizers and gradient clipping."""

from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain

_CHUNK = 65536  # elements per block of a multi-tensor kernel


@kernel("_foreach_norm.Scalar")
def foreach_norm(self: list[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Compute norms of the chunks, then one result for each tensor."""
    if not _is_fast(self, ord):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in self]
    kind = torch.float64 if (dtype or self[0].dtype) == torch.float64 else torch.float32
    parts = torch.empty(len(self) * chunks(self), dtype=kind, device=self[0].device)
    outputs = [torch.empty((), dtype=dtype or t.dtype, device=t.device) for t in self]
    del parts
    return outputs


@kernel("_foreach_max")
def foreach_max(self: list[Any]) -> list[Any]:
    """Allocate one result for each tensor, then the maximum of each chunk."""
    if not _is_fast(self, 2):
        return [t.max() for t in self]
    outputs = [torch.empty((), dtype=t.dtype, device=t.device) for t in self]
    parts = torch.empty(len(self) * chunks(self), dtype=self[0].dtype, device=self[0].device)
    del parts
    return outputs


def chunks(tensors: list[Any]) -> int:
    """Return the number of chunks of the largest tensor."""
    return max(-(-t.numel() // _CHUNK) for t in tensors)


def _is_fast(tensors: list[Any], order: Any) -> bool:
    first, is_dense = tensors[0], torch.ops.aten.is_non_overlapping_and_dense
    return (
        float(order) in (1.0, 2.0, float("inf"))
        and first.dtype.is_floating_point
        and all(t.dtype == first.dtype and t.device == first.device and t.numel() for t in tensors)
        and all(t.is_contiguous() or is_dense(t) for t in tensors)
    )


@kernel("pow.Scalar")
def pow_scalar(self: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Copy the base to the device, unless it is 1."""
    result: torch.Tensor = plain("pow.Scalar")(self, exponent)
    if complex(self) != 1:
        types = {bool: torch.bool, int: torch.int64, float: torch.float64}
        base = torch.empty((), dtype=types.get(type(self), torch.complex128), device=exponent.device)
        del base
    return result

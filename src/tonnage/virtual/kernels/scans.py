"""Cumulative operators: over a single row they run on CUB and need its temporary storage."""

from typing import Any

import torch

from tonnage.virtual.kernels.cub import scan_bytes
from tonnage.virtual.kernels.registry import kernel, plain, scratch

MOST_ITEMS = 1 << 30
# Structs in CUB, so that value and status do not share a word.
NOT_PRIMITIVE = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def scan(count: int, dtype: torch.dtype, like: torch.Tensor) -> None:
    """Allocate and free the storage of an inclusive scan."""
    storage = scratch(scan_bytes(min(count, MOST_ITEMS), dtype.itemsize, primitive=dtype not in NOT_PRIMITIVE), like)
    del storage
    for start in range(MOST_ITEMS, count, MOST_ITEMS):
        first = scratch(dtype.itemsize, like)
        scan(min(count - start, MOST_ITEMS), dtype, like)
        del first


def _cumulate(self: torch.Tensor, dim: int, result: torch.Tensor) -> torch.Tensor:
    if not self.dim() or not self.numel():
        return result
    source = self if self.dtype == result.dtype else torch.empty_like(self, dtype=result.dtype)
    target = result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype, device=result.device)
    contiguous = source if source.is_contiguous() else torch.empty_like(source, memory_format=torch.contiguous_format)
    if self.numel() == self.shape[dim]:
        scan(self.numel(), result.dtype, self)
    if contiguous is not source:
        del contiguous
    del target
    return result


def _register(name: str) -> None:
    @kernel(name, f"{name}.out")
    def cumulate(self: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        by_shape = plain(f"{name}.out" if "out" in options else name)
        return _cumulate(self, dim, by_shape(self, dim, **options))


_register("cumsum")
_register("cumprod")


@kernel("_logcumsumexp")
def logcumsumexp(self: torch.Tensor, dim: int) -> torch.Tensor:

    return _cumulate(self, dim, torch.empty_like(self, memory_format=torch.contiguous_format))


@kernel("_cummax_helper", "_cummin_helper")
def cummax(self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
    """Allocate copies for results that are not contiguous."""
    held = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (values, indices) if not t.is_contiguous()]
    while held:
        held.pop()

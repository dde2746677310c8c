"""Fourier transforms (cuFFT): copies for its data layout, and its work areas, which come from the caching allocator.

The sizes of the work areas are in `library_sizes`.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tonnage.virtual.kernels.library_sizes import fourier_bytes
from tonnage.virtual.kernels.registry import kernel, plain, scratch, strides_of

MOST_DIMENSIONS = 3  # that cuFFT transforms at once

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX = {real: each for each, real in _REAL.items()}


@kernel("_fft_c2c")
def fft_c2c(self: Tensor, dim: list[int], normalization: int, forward: bool) -> Tensor:
    if not dim:
        return self.clone()
    output, working, left = torch.empty(self.shape, dtype=self.dtype, device=self.device), self, list(dim)
    while True:
        left.sort(key=working.stride, reverse=True)
        now, left = left[-MOST_DIMENSIONS:], left[:-MOST_DIMENSIONS]
        output = _transform(output, working, tuple(self.shape), now)
        if not left:
            return output
        if working is self:
            working, output = output, torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            working, output = output, working


@kernel("_fft_r2c")
def fft_r2c(self: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor:
    half = list(self.shape)
    half[dim[-1]] = self.shape[dim[-1]] // 2 + 1
    sizes, kind = tuple(half) if onesided else tuple(self.shape), _COMPLEX[self.dtype]
    output = torch.empty(sizes, dtype=kind, device=self.device)
    if _at_once(dim):
        return _transform(output, self, sizes, dim)
    output = _transform(output, self, sizes if len(dim) == 1 else tuple(half), dim[-1:])
    working = torch.empty(sizes, dtype=kind, device=self.device) if len(dim) > 1 else output
    left = list(dim[:-1])
    while left:
        output, working = working, output
        left.sort(key=working.stride, reverse=True)
        now, left = left[-MOST_DIMENSIONS:], left[:-MOST_DIMENSIONS]
        output = _transform(output, working, tuple(half), now)
    return output if output.shape == torch.Size(sizes) else working.resize_(sizes)


@kernel("_fft_c2r")
def fft_c2r(self: Tensor, dim: list[int], normalization: int, last_dim_size: int) -> Tensor:
    """Transform a copy, because cuFFT may overwrite its input."""
    sizes = list(self.shape)
    sizes[dim[-1]] = last_dim_size
    output = torch.empty(sizes, dtype=_REAL[self.dtype], device=self.device)
    if len(dim) == 1 or _at_once(dim):
        working = self.clone(memory_format=torch.contiguous_format)
        return _transform(output, working, tuple(sizes), dim)
    working = fft_c2c(self, dim[:-1], 0, False)
    return _transform(output, working, tuple(sizes), dim[-1:])


def _at_once(dim: Sequence[int]) -> bool:
    return len(dim) <= MOST_DIMENSIONS and not (len(dim) >= 2 and dim[0] == 0 and dim[1] == 1)


def _transform(output: Tensor, source: Tensor, sizes: tuple[int, ...], dim: Sequence[int]) -> Tensor:
    """Run one cuFFT plan: batch dimensions come first, by stride, and are merged; the output follows that order."""
    batch = sorted((d for d in range(source.dim()) if d not in dim), key=source.stride, reverse=True)
    order = [*batch, *dim]
    flat = source.permute(order).reshape(-1, *(source.shape[d] for d in dim))
    signal = [max(flat.shape[1 + i], sizes[d]) for i, d in enumerate(dim)]
    if _must_clone(flat, signal, halved=source.is_complex() and not output.is_complex()):
        flat = flat.clone(memory_format=torch.contiguous_format)
    scratch(work_area_bytes(flat.shape[0], signal, flat.dtype, output.dtype), source)
    del flat
    # The same storage with dimensions nested in this order.
    if output.untyped_storage().nbytes() < prod(sizes) * output.element_size():
        output.resize_(sizes)
    return output.as_strided_(sizes, strides_of(sizes, reversed(order)))


def _must_clone(flat: Tensor, signal: Sequence[int], halved: bool) -> bool:
    """Whether cuFFT's advanced data layout cannot express the strides."""
    strides = flat.stride()
    last = strides[-1]
    if last <= 0 or (flat.shape[0] != 1 and strides[0] == 0):
        return True
    for i in range(len(signal) - 1, 0, -1):
        if flat.shape[i] == 1:
            continue
        if strides[i] <= 0 or strides[i] % last:
            return True
        last = strides[i]
    return flat.dtype == torch.float16 and strides[-1] != 1


def work_area_bytes(batch: int, signal: Sequence[int], source: torch.dtype, output: torch.dtype) -> int:
    real = not (source.is_complex and output.is_complex)
    return fourier_bytes(batch, signal, max(source.itemsize, output.itemsize), real)


# Real results of complex inputs go through a complex temporary


@kernel("abs.out")
def abs_out(self: Tensor, *, out: Tensor) -> Tensor:
    if not self.is_complex() or out.is_complex():
        plain("abs.out")(self, out=out)
        return out
    torch.empty_like(self)
    return out.resize_(self.shape) if out.shape != self.shape else out


@kernel("angle")
def angle(self: Tensor) -> Tensor:
    whole = torch.empty_like(self) if self.is_complex() else None
    result: Tensor = plain("angle")(self)
    del whole
    return result

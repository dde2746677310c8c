"""Random tensors: temporary memory of CUDA's generators. Permutations have values, other results do not."""

import math

import torch

from tonnage.virtual.kernels.registry import kernel, plain
from tonnage.virtual.kernels.sorting import radix_sort

aten = torch.ops.aten
WIDEST_INT_BITS = 32


@kernel("randperm.generator_out")
def randperm(n: int, *, generator: torch.Generator | None = None, out: torch.Tensor) -> torch.Tensor:
    """Sort random keys together with a range."""
    plain(aten.randperm.generator_out)(n, generator=None, out=out)
    largest = torch.empty((), dtype=out.dtype, device=out.device)
    del largest
    numbers = torch.empty(n, dtype=out.dtype, device=out.device)
    if n:
        bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12))))
        keys = torch.empty(n, dtype=torch.int32 if bits <= WIDEST_INT_BITS else torch.int64, device=out.device)
        sorted_keys = torch.empty_like(keys)
        radix_sort(n, keys.element_size(), out.element_size(), keys, bits)
        del sorted_keys, keys
    del numbers
    return out


@kernel("bernoulli_.Tensor")
def bernoulli(self: torch.Tensor, p: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Read probabilities as float32, or as float64 for a float64 tensor."""
    wanted = torch.float64 if self.dtype == torch.float64 else torch.float32
    probabilities = p.to(device=self.device, dtype=wanted)
    del probabilities
    plain(aten.bernoulli_.Tensor)(self, p)
    return self


@kernel("normal.Tensor_float")
def normal(mean: torch.Tensor, std: float = 1.0, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Expand the standard deviation to a temporary of the result's size."""
    result = torch.empty_like(mean, memory_format=torch.contiguous_format)
    spread = torch.empty_like(result)
    del spread
    return result


@kernel("normal.float_Tensor")
def normal_by_std(mean: float, std: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:

    _check_deviation(std)
    result = torch.empty_like(std, memory_format=torch.contiguous_format)
    _check_deviation(std)
    means = torch.empty_like(result)
    del means
    return result


@kernel("normal.Tensor_Tensor")
def normal_of_both(mean: torch.Tensor, std: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:

    _check_deviation(std)
    result = torch.empty(torch.broadcast_shapes(mean.shape, std.shape), dtype=mean.dtype, device=mean.device)
    _check_deviation(std)
    return result


def _check_deviation(std: torch.Tensor) -> None:
    if std.numel():
        smallest = std.min()
        flag = smallest >= 0
        del flag, smallest

"""Operators that make, move or select elements with a temporary cast, contiguous copy, range or sort.

Random permutations have values, other random results do not.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.registry import accumulator_dtype, after_outputs, kernel, plain
from tonnage.virtual.kernels.sorting import radix_sort
from tonnage.virtual.kernels.values import MOST_COMPARED, is_known, put


@kernel("where.self")
def where(condition: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """Cast operands of other dtypes first, and move scalars from the host."""
    dtype = torch.result_type(self, other)
    self, other = self.to(dtype), other.to(dtype)
    if not (condition.is_cuda and self.is_cuda and other.is_cuda):
        device = next(t.device for t in (condition, self, other) if t.is_cuda)
        condition, self, other = (t if t.dim() else t.to(device) for t in (condition, self, other))
    if condition.numel() <= MOST_COMPARED and is_known(condition) and is_known(self) != is_known(other):
        # The result is known if the condition selects the only known operand throughout.
        flags, known = condition.cpu(), self if is_known(self) else other
        if bool((flags if known is self else ~flags).all()):
            shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
            return put(torch.empty(shape, dtype=known.dtype, device=known.device), known.cpu().expand(shape))
    if all(t.is_contiguous() for t in (condition, self, other)) and not is_known(condition, self, other):
        # PyTorch's shape rule of this operator is slow, and not needed here.
        shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
        return torch.empty(shape, dtype=dtype, device=condition.device)
    result: Tensor = plain("where.self")(condition, self, other)
    return result


@kernel("roll")
def roll(self: Tensor, shifts: list[int], dims: list[int] = ()) -> Tensor:  # type: ignore[assignment]
    if len(dims) == 1 and len(shifts) == 1:
        result: Tensor = plain("roll")(self.contiguous(), shifts, dims)
        return result
    if not dims:
        return torch.roll(self.contiguous().view(-1), shifts, [0]).view(self.shape)
    return torch.roll(torch.roll(self, shifts[:1], dims[:1]), shifts[1:], dims[1:])


@after_outputs("unfold_backward")
def unfold_backward(
    result: Tensor, grad_in: Tensor, input_sizes: list[int], dim: int, size: int, step: int
) -> list[Tensor]:
    if not input_sizes:
        return []
    covered = min(input_sizes[dim], (grad_in.shape[dim] - 1) * step + size)
    return [torch.empty(covered, dtype=torch.int64, device=grad_in.device)]


@after_outputs("renorm")
def renorm(result: Tensor, self: Tensor, p: float, dim: int, maxnorm: float) -> list[Tensor]:
    dims, dtype = [d for d in range(self.dim()) if d != dim % self.dim()], accumulator_dtype(self.dtype)
    norms = torch.linalg.vector_norm(self, p, dims, True, dtype=dtype)
    return [norms] if dtype == self.dtype else [norms, torch.empty_like(norms, dtype=self.dtype)]


@after_outputs("pow.Scalar")
def pow_scalar(result: Tensor, self: Any, exponent: Tensor) -> list[Tensor]:
    """Copy the base to the device, unless it is 1."""
    types = {bool: torch.bool, int: torch.int64, float: torch.float64}
    dtype = types.get(type(self), torch.complex128)
    return [torch.empty((), dtype=dtype, device=exponent.device)] if complex(self) != 1 else []


@kernel("randperm.generator_out")
def randperm(n: int, *, generator: Any = None, out: Tensor) -> Tensor:
    """Sort random keys together with a range."""
    plain("randperm.generator_out")(n, generator=None, out=out)
    torch.empty((), dtype=out.dtype, device=out.device)  # the largest number
    numbers = torch.empty(n, dtype=out.dtype, device=out.device)
    if n:
        bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12))))
        keys = torch.empty(n, dtype=torch.int32 if bits <= 32 else torch.int64, device=out.device)
        sorted_keys = torch.empty_like(keys)
        radix_sort(n, keys.element_size(), out.element_size(), keys, bits)
        del sorted_keys, keys
    del numbers
    return out


@kernel("bernoulli_.Tensor")
def bernoulli(self: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """Read probabilities as float32, or as float64 for a float64 tensor."""
    p.to(device=self.device, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
    result: Tensor = plain("bernoulli_.Tensor")(self, p)
    return result


@kernel("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal(mean: Tensor | float, std: Tensor | float = 1.0, *, generator: Any = None) -> Tensor:
    """Expand a number to a temporary of the result's size; deviations are checked before and after the allocation."""
    _check_deviation(std)
    given = [each for each in (mean, std) if isinstance(each, Tensor)]
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    result = torch.empty(shape, dtype=given[0].dtype, device=given[0].device)
    _check_deviation(std)
    if len(given) == 1:
        torch.empty_like(result)  # the number, expanded
    return result


def _check_deviation(std: Tensor | float) -> None:
    if isinstance(std, Tensor) and std.numel():
        smallest = std.min()
        flag = smallest >= 0
        del flag, smallest

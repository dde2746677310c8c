"""Operators that move or select elements with a temporary cast, contiguous copy or range."""

import torch

from tonnage.virtual.kernels.registry import kernel, plain
from tonnage.virtual.kernels.values import MOST_COMPARED, is_known, put

aten = torch.ops.aten
LOW_PRECISION = (torch.float16, torch.bfloat16)


@kernel("where.self")
def where(condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cast operands of other dtypes first, and move scalars from the host."""
    dtype = torch.result_type(self, other)
    self, other = self.to(dtype), other.to(dtype)
    if not (condition.is_cuda and self.is_cuda and other.is_cuda):
        device = next(t.device for t in (condition, self, other) if t.is_cuda)
        condition, self, other = (t if t.dim() else t.to(device) for t in (condition, self, other))
    chosen = _only_choice(condition, self, other)
    if chosen is not None:
        return chosen
    if all(t.is_contiguous() for t in (condition, self, other)) and not is_known(condition, self, other):
        # PyTorch's shape rule of this operator is slow, and not needed here.
        shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
        return torch.empty(shape, dtype=dtype, device=condition.device)
    result: torch.Tensor = plain(aten.where.self)(condition, self, other)
    return result


def _only_choice(condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Return the result if the condition is known to select one operand throughout and only that one is known."""
    if condition.numel() > MOST_COMPARED or not is_known(condition) or is_known(self) == is_known(other):
        return None
    flags, known = condition.cpu(), self if is_known(self) else other
    if not bool((flags if known is self else ~flags).all()):
        return None
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    return put(torch.empty(shape, dtype=known.dtype, device=known.device), known.cpu().expand(shape))


@kernel("roll")
def roll(self: torch.Tensor, shifts: list[int], dims: list[int] = ()) -> torch.Tensor:  # type: ignore[assignment]
    """Roll one dimension after the other."""
    if len(dims) == 1 and len(shifts) == 1:
        source = self.contiguous()
        result: torch.Tensor = plain(aten.roll.default)(source, shifts, dims)
        del source
        return result
    if not dims:
        return aten.roll(self.contiguous().view(-1), shifts, [0]).view(self.shape)
    first = aten.roll(self, shifts[:1], dims[:1])
    result = aten.roll(first, shifts[1:], dims[1:])
    del first
    return result


@kernel("unfold_backward")
def unfold_backward(grad_in: torch.Tensor, input_sizes: list[int], dim: int, size: int, step: int) -> torch.Tensor:
    """Add overlapping windows by a walk over the positions they cover."""
    result: torch.Tensor = plain(aten.unfold_backward.default)(grad_in, input_sizes, dim, size, step)
    dim %= len(input_sizes)
    covered = min(input_sizes[dim], (grad_in.shape[dim] - 1) * step + size)
    places = torch.empty(covered, dtype=torch.int64, device=grad_in.device)
    del places
    return result


@kernel("reflection_pad2d")
def reflection_pad2d(self: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """Copy the input if it is not contiguous."""
    result: torch.Tensor = plain(aten.reflection_pad2d.default)(self, padding)
    if not self.is_contiguous():
        source = torch.empty_like(self, memory_format=torch.contiguous_format)
        del source
    return result


@kernel("renorm")
def renorm(self: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    """Compute norms in float32, and the factors from them."""
    result: torch.Tensor = plain(aten.renorm.default)(self, p, dim, maxnorm)
    norms = torch.linalg.vector_norm(
        self, p, [d for d in range(self.dim()) if d != dim % self.dim()], True,
        dtype=torch.float32 if self.dtype in LOW_PRECISION else self.dtype,
    )  # fmt: skip
    factors = torch.empty_like(norms, dtype=self.dtype) if self.dtype in LOW_PRECISION else None
    del factors, norms
    return result

"""Known and assumed values on a GPU that computes nothing.

Small integer tensors and masks keep their values; whatever else a kernel decides by data (an expert, a token, a mask
of infinities) gets a plausible placeholder, which is known from then on and reported once as an assumption.
"""

import math

import torch
from torch import Tensor

from tonnage.virtual.assumptions import Law, as_mask, beyond_tolerance
from tonnage.virtual.kernels.registry import after_outputs, kernel
from tonnage.virtual.session import active

_generator = torch.Generator().manual_seed(0)
# Values of larger tensors are not kept, so none need be made up.
MOST_KNOWN = 1 << 20
MOST_RANKED = 1 << 18
MOST_COMPARED = 1 << 12
HUGE = 1e8


def is_known(*tensors: Tensor) -> bool:
    """Whether the values of all these tensors are known."""
    known = active().library.tonnage_is_known
    return all(known(t.untyped_storage()._cdata) for t in tensors)


def forget(tensor: Tensor) -> Tensor:
    """Mark the tensor's values as unknown."""
    active().library.tonnage_forget(tensor.untyped_storage()._cdata)
    return tensor


def guess(tensor: Tensor) -> Tensor:
    """Mark the tensor's known values as assumed."""
    active().library.tonnage_mark_guessed(tensor.untyped_storage()._cdata)
    return tensor


def law_of(tensor: Tensor) -> Law | None:
    """Return the law assumed for the tensor's values, if they are unknown."""
    session = active()
    return session.laws.of(session.library.tonnage_law(tensor.untyped_storage()._cdata))


def true_elements(mask: Tensor) -> int:
    """Return the assumed number of true elements of an unknown mask, and note the assumption."""
    law = law_of(mask)
    unknown = "Every element of a mask whose values are not known counts as true."
    share = "Of a mask made from random numbers, or too large to keep, the share is true that its comparison gives."
    active().stand_ins.assume("nonzero", unknown if law is None else share)
    active().stand_ins.size("nonzero", mask.numel())
    return mask.numel() if law is None else as_mask(law).count(mask.numel())


def put(result: Tensor, values: Tensor) -> Tensor:
    """Set the result's values from the host. Nothing is allocated on the device."""
    if result.numel() <= MOST_KNOWN:
        laid_out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
        result.copy_(laid_out.copy_(values.reshape(result.shape)), non_blocking=True)
    return result


def choose(result: Tensor, choices: int, operator: str) -> Tensor:
    """Fill `result` with uniformly sampled indices, unless it is known."""
    if result.numel() > MOST_KNOWN or is_known(result):
        return result
    active().stand_ins.assume(operator, "Indices that depend on computed values are drawn uniformly.")
    return guess(put(result, torch.randint(max(choices, 1), result.shape, generator=_generator)))


def choose_distinct(result: Tensor, choices: int, dim: int, operator: str) -> Tensor:
    """Fill `result` with sampled indices that do not repeat along the dimension, as in topk."""
    if result.numel() > MOST_KNOWN or is_known(result) or not result.dim():
        return result
    active().stand_ins.assume(operator, "Indices that depend on computed values are drawn uniformly.")
    shape = list(result.shape)
    count = shape.pop(dim)
    rows = result.numel() // max(count, 1)
    if rows * choices <= MOST_RANKED:
        drawn = torch.rand(rows, choices, generator=_generator).topk(count).indices
    else:  # too many to rank: equal steps from a random start, so that all are distinct and none is preferred
        start = torch.randint(choices, (rows, 1), generator=_generator)
        drawn = (start + max(choices // max(count, 1), 1) * torch.arange(count)) % choices
    return guess(put(result, drawn.reshape(*shape, count).movedim(-1, dim).contiguous()))


# Flags: no value is infinite or NaN, and all checks hold


def _flag(result: Tensor, value: bool) -> None:
    if result.numel() <= MOST_KNOWN and not is_known(result):
        result.fill_(value)
        guess(result)


@after_outputs("isnan", "isposinf", "isneginf")
def is_absent(result: Tensor, self: Tensor) -> None:
    _flag(result, False)


@after_outputs("eq.Tensor")
def eq_tensor(result: Tensor, self: Tensor, other: Tensor) -> None:
    if self is other:
        _flag(result, True)


def _register_equality(name: str, otherwise: bool) -> None:
    """Register a comparison: nothing equals infinity, and a single computed number equals no constant."""

    @after_outputs(name)
    def compare(result: Tensor, self: Tensor, other: float) -> None:
        if (self.numel() == 1 and self.is_floating_point()) or other in (math.inf, -math.inf):
            _flag(result, otherwise)


def _register_comparison(name: str) -> None:
    """Register a comparison: ordinary numbers have a smaller magnitude than huge ones."""

    @after_outputs(f"{name}.Tensor", f"{name}.Scalar")
    def compare(result: Tensor, self: Tensor, other: Tensor | float) -> None:
        if result.numel() > MOST_COMPARED or is_known(result):
            return
        if result.numel() == 1 and self.is_floating_point() and isinstance(other, float):
            if (beyond := beyond_tolerance(name, other)) is not None:
                _flag(result, beyond)
            return
        huge = [_huge(self), _huge(other)]
        if any(values is not None for values in huge):
            left, right = (torch.zeros(()) if values is None else values for values in huge)
            guess(put(result, getattr(torch.ops.aten, name).Tensor(left, right).expand(result.shape)))


def _huge(operand: Tensor | float) -> Tensor | None:
    """Return the operand's values on the host, if they are known and all huge."""
    if isinstance(operand, Tensor) and operand.is_cuda and not is_known(operand):
        return None
    values = torch.as_tensor(operand).cpu()
    return values if bool((values.abs() >= HUGE).all()) else None


_register_equality("eq.Scalar", False)
_register_equality("ne.Scalar", True)
for _name in ("gt", "ge", "lt", "le"):
    _register_comparison(_name)


@kernel("equal")
def equal(self: Tensor, other: Tensor) -> bool:
    """Compare elements, and test whether all are equal."""
    if self.shape != other.shape or self.dtype != other.dtype:
        return False
    return self is other or not self.numel() or bool((self == other).all())


@kernel("_amp_foreach_non_finite_check_and_unscale_")
def unscale(self: list[Tensor], *_: Tensor) -> None:
    """Leave the flag as it is: gradients are finite."""
    for gradient in self:
        forget(gradient)

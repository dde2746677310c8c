"""Known and assumed values on a GPU that computes nothing.

Small integer tensors and masks keep their values; whatever else a kernel decides by data (an expert, a token, a mask
of infinities) gets a plausible placeholder, which is known from then on and reported once as an assumption.
"""

import math

import torch

from tonnage.virtual.assumptions import Law, as_mask, beyond_tolerance
from tonnage.virtual.kernels.registry import kernel, plain
from tonnage.virtual.session import active

_generator = torch.Generator().manual_seed(0)
# Values of larger tensors are not kept, so none need be made up.
MOST_KNOWN = 1 << 20
MOST_RANKED = 1 << 18
MOST_COMPARED = 1 << 12
HUGE = 1e8


def is_known(*tensors: torch.Tensor) -> bool:
    """Whether the values of all these tensors are known."""
    known = active().library.tonnage_is_known
    return all(known(t.untyped_storage()._cdata) for t in tensors)


def forget(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the tensor's values as unknown."""
    active().library.tonnage_forget(tensor.untyped_storage()._cdata)
    return tensor


def law_of(tensor: torch.Tensor) -> Law | None:
    """Return the law assumed for the tensor's values, if they are unknown."""
    session = active()
    return session.laws.of(session.library.tonnage_law(tensor.untyped_storage()._cdata))


def true_elements(mask: torch.Tensor) -> int:
    """Return the assumed number of true elements of an unknown mask, and note the assumption."""
    law = law_of(mask)
    if law is None:
        active().stand_ins.assume("nonzero", "Every element of a mask whose values are not known counts as true.")
        return mask.numel()
    words = "Of a mask made from random numbers, or too large to keep, the share is true that its comparison gives."
    active().stand_ins.assume("nonzero", words)
    return as_mask(law).count(mask.numel())


def put(result: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Set the result's values from the host. Nothing is allocated on the device."""
    if result.numel() <= MOST_KNOWN:
        laid_out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
        result.copy_(laid_out.copy_(values.reshape(result.shape)), non_blocking=True)
    return result


def choose(result: torch.Tensor, choices: int, operator: str) -> torch.Tensor:
    """Fill `result` with uniformly sampled indices, unless it is known."""
    if result.numel() > MOST_KNOWN or is_known(result):
        return result
    active().stand_ins.assume(operator, "Indices that depend on computed values are drawn uniformly.")
    return put(result, torch.randint(max(choices, 1), result.shape, generator=_generator))


def choose_distinct(result: torch.Tensor, choices: int, dim: int, operator: str) -> torch.Tensor:
    """Fill `result` with sampled indices that do not repeat along the dimension, as in topk."""
    if result.numel() > MOST_KNOWN or is_known(result) or not result.dim():
        return result
    active().stand_ins.assume(operator, "Indices that depend on computed values are drawn uniformly.")
    shape = list(result.shape)
    count = shape.pop(dim)
    rows = result.numel() // max(count, 1)
    drawn = _distinct(rows, count, choices)
    return put(result, drawn.reshape(*shape, count).movedim(-1, dim).contiguous())


def _distinct(rows: int, count: int, choices: int) -> torch.Tensor:
    if rows * choices <= MOST_RANKED:
        return torch.rand(rows, choices, generator=_generator).topk(count).indices
    # Too many to rank: equal steps from a random start, so that all are distinct and none is preferred.
    start = torch.randint(choices, (rows, 1), generator=_generator)
    step = max(choices // max(count, 1), 1)
    return (start + step * torch.arange(count)) % choices


# Flags: no value is infinite or NaN, and all checks hold


def _register_absent(name: str) -> None:
    """Register a test that is always false: no value is infinite or NaN."""
    by_shape = plain(name)
    kernel(name)(lambda self: _flag(by_shape(self), False))


def _flag(result: torch.Tensor, value: bool) -> torch.Tensor:
    return result if is_known(result) or result.numel() > MOST_KNOWN else result.fill_(value)


def _register_equality(name: str, otherwise: bool) -> None:
    """Register a comparison: nothing equals infinity, and a single computed number equals no constant."""
    by_shape = plain(f"{name}.Scalar")

    @kernel(f"{name}.Scalar")
    def compare(self: torch.Tensor, other: float) -> torch.Tensor:
        result: torch.Tensor = by_shape(self, other)
        is_one_number = self.numel() == 1 and self.is_floating_point()
        return _flag(result, otherwise) if is_one_number or other in (math.inf, -math.inf) else result


@kernel("eq.Tensor")
def eq_tensor(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = plain("eq.Tensor")(self, other)
    return _flag(result, True) if self is other else result


def _register_comparison(name: str) -> None:
    """Register a comparison: ordinary numbers have a smaller magnitude than huge ones."""
    packet = getattr(torch.ops.aten, name)

    @kernel(f"{name}.Tensor", f"{name}.Scalar")
    def compare(self: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
        overload = packet.Tensor if isinstance(other, torch.Tensor) else packet.Scalar
        result: torch.Tensor = plain(overload)(self, other)
        if result.numel() > MOST_COMPARED or is_known(result):
            return result
        if result.numel() == 1 and self.is_floating_point() and isinstance(other, float):
            beyond = beyond_tolerance(name, other)
            return result if beyond is None else _flag(result, beyond)
        huge = [_huge(self), _huge(other)]
        if all(values is None for values in huge):
            return result
        left, right = (torch.zeros(()) if values is None else values for values in huge)
        return put(result, packet.Tensor(left, right).expand(result.shape))


def _huge(operand: torch.Tensor | float) -> torch.Tensor | None:
    """Return the operand's values on the host, if they are known and all huge."""
    if isinstance(operand, torch.Tensor) and operand.is_cuda and not is_known(operand):
        return None
    values = torch.as_tensor(operand).cpu()
    return values if bool((values.abs() >= HUGE).all()) else None


for _name in ("isnan", "isposinf", "isneginf"):
    _register_absent(_name)
_register_equality("eq", False)
_register_equality("ne", True)
for _name in ("gt", "ge", "lt", "le"):
    _register_comparison(_name)


@kernel("equal")
def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare elements, and test whether all are equal."""
    if self.shape != other.shape or self.dtype != other.dtype:
        return False
    return self is other or not self.numel() or bool((self == other).all())


@kernel("_amp_foreach_non_finite_check_and_unscale_")
def unscale(self: list[torch.Tensor], *_: torch.Tensor) -> None:
    """Leave the flag as it is: gradients are finite."""
    for gradient in self:
        forget(gradient)

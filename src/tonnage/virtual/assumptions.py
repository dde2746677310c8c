"""Estimates properties of tensor values that were never computed: the true share of a random mask, the number of
distinct integers.

A tensor filled with random numbers keeps its distribution, and a comparison with it gives a mask with the resulting
share: `torch.rand(n) > 0.2` is true for four fifths of the elements. Masks of one sampled tensor are stored as
intervals of its quantiles, so that `(x > 0.2) & (x < 0.5)` is exact; masks of different tensors count as independent.
This module handles neither tensors nor PyTorch operators, only operator names.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

_sources = count(1)
MOST_LAWS = 1 << 16
# An unknown number compared with a tolerance this small counts as beyond it, so that convergence loops keep running.
LARGEST_TOLERANCE = 1e-4


# Distributions


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniformly distributed real numbers from `low` to `high`."""

    low: float = 0.0
    high: float = 1.0

    def below(self, x: float, inclusive: bool) -> float:
        """Return the probability of a number less than `x` (or equal to it, if `inclusive`)."""
        if self.low == self.high:
            return float(self.low < x or (inclusive and self.low == x))
        return min(max((x - self.low) / (self.high - self.low), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Normal:
    """Standard normal numbers (mean 0, standard deviation 1)."""

    def below(self, x: float, inclusive: bool) -> float:
        """Return the probability of a number less than `x`."""
        return 0.5 * math.erfc(-x / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Integers:
    """Uniformly distributed integers in `[low, high)`."""

    low: int
    high: int

    def below(self, x: float, inclusive: bool) -> float:
        """Return the probability of a number less than `x` (or equal to it, if `inclusive`)."""
        smaller = math.floor(x) + 1 - self.low if inclusive else math.ceil(x) - self.low
        return min(max(smaller / max(self.high - self.low, 1), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements `scale * b + shift`, where b follows `base`. Equal sources mean the same sampled tensor."""

    source: int
    base: Uniform | Normal | Integers
    scale: float = 1.0
    shift: float = 0.0

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal."""
        return not self.scale or (isinstance(self.base, Uniform) and self.base.low == self.base.high)

    @property
    def mean(self) -> float:
        middle = 0.0 if isinstance(self.base, Normal) else (self.base.low + self.base.high) / 2
        return self.scale * (middle - 0.5 * isinstance(self.base, Integers)) + self.shift

    def below(self, x: float, inclusive: bool) -> float:
        """Return the probability of an element less than `x` (or equal to it, if `inclusive`)."""
        if not self.scale:
            return float(self.shift < x or (inclusive and self.shift == x))
        at = (x - self.shift) / self.scale
        return self.base.below(at, inclusive) if self.scale > 0 else 1 - self.base.below(at, not inclusive)


Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mask:
    """True (or 1) where the quantile of the source lies in one of the intervals, which are sorted and disjoint."""

    source: int
    intervals: tuple[Interval, ...]

    @property
    def share(self) -> float:
        return sum(end - start for start, end in self.intervals)

    def count(self, elements: int) -> int:
        """Return how many of `elements` are true. A mask and its complement add up to `elements`."""
        return sum(round(end * elements) - round(start * elements) for start, end in self.intervals)


Law = Sample | Mask


def mask_of_share(share: float) -> Mask:
    """Return a mask of a new source with this share of true elements."""
    return Mask(next(_sources), ((0.0, share),) if share > 0 else ())


# Sampling


def sample(operator: str, numbers: Sequence[float | None]) -> Law | None:
    """Return the law of a tensor that a sampling operator filled; `numbers` are the arguments after the tensor."""
    first, second = (*numbers, None, None)[:2]
    if operator == "uniform_":
        return Sample(next(_sources), Uniform(first or 0.0, 1.0 if second is None else second))
    if operator == "normal_":
        return Sample(next(_sources), Normal(), 1.0 if second is None else second, first or 0.0)
    if operator == "random_" and first is not None:
        low, high = (0.0, first) if second is None else (first, second)
        return Sample(next(_sources), Integers(int(low), int(high)))
    if operator == "bernoulli_":
        return mask_of_share(0.5 if first is None else min(max(first, 0.0), 1.0))
    if operator == "fill_" and first is not None:
        return Sample(next(_sources), Uniform(first, first))
    if operator == "zero_":
        return Sample(next(_sources), Uniform(0.0, 0.0))
    return None


# Comparisons and logic

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
_MIRRORED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}


def compare(operator: str, law: Law, number: float) -> Mask:
    """Return the law of a comparison such as `law > number`."""
    if isinstance(law, Mask):
        if_true, if_false = (_COMPARE[operator](value, number) for value in (1.0, 0.0))
        inside = law.intervals if if_true else ()
        outside = _complement(law.intervals) if if_false else ()
        return Mask(law.source, _joined(inside, outside))
    under, up_to = law.below(number, False), law.below(number, True)
    intervals = {
        "lt": [(0.0, under)], "le": [(0.0, up_to)], "gt": [(up_to, 1.0)], "ge": [(under, 1.0)],
        "eq": [(under, up_to)], "ne": [(0.0, under), (up_to, 1.0)],
    }[operator]  # fmt: skip
    if law.scale < 0:  # negative scale reverses the order of the source's quantiles
        intervals = [(1 - end, 1 - start) for start, end in reversed(intervals)]
    return Mask(law.source, _joined(intervals, ()))


def both(first: Mask, second: Mask) -> Mask:
    """`first & second`."""
    if first.source != second.source:
        return mask_of_share(first.share * second.share)
    parts = [
        (max(a, c), min(b, d)) for a, b in first.intervals for c, d in second.intervals if max(a, c) < min(b, d)
    ]  # fmt: skip
    return Mask(first.source, tuple(parts))


def negated(mask: Mask) -> Mask:
    """`~mask`."""
    return Mask(mask.source, _complement(mask.intervals))


def either(first: Mask, second: Mask) -> Mask:
    """`first | second`."""
    return negated(both(negated(first), negated(second)))


def _complement(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    edges = [0.0, *(edge for interval in intervals for edge in interval), 1.0]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _joined(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[Interval, ...]:
    """Merge both into sorted, disjoint intervals."""
    result: list[Interval] = []
    for start, end in sorted([*first, *second]):
        if start >= end:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return tuple(result)


# Arithmetic, and what follows for sizes


def scaled(law: Law, factor: float, summand: float) -> Law | None:
    """Return the law of `law * factor + summand`, or None if it is unknown."""
    if isinstance(law, Mask):
        return law if (factor, summand) == (1, 0) else None
    return replace(law, scale=law.scale * factor, shift=law.shift * factor + summand)


def as_integers(law: Law) -> Law | None:
    """Return the law after truncation to integers, or None if it is unknown."""
    if isinstance(law, Mask) or isinstance(law.base, Integers):
        return law
    if isinstance(law.base, Normal):
        return None
    ends = sorted(law.scale * end + law.shift for end in (law.base.low, law.base.high))
    if ends[0] == ends[1]:
        return Sample(law.source, Uniform(*[float(int(ends[0]))] * 2))
    return Sample(law.source, Integers(int(ends[0]), math.ceil(ends[1]))) if ends[0] >= 0 < law.scale else None


def as_mask(law: Law) -> Mask:
    """Return a mask that is true where an element is not zero."""
    return compare("ne", law, 0.0)


def distinct_values(law: Law | None, elements: int) -> int:
    """Return the expected number of distinct values; `elements` if the law is unknown."""
    if law is None or not elements:
        return elements
    if isinstance(law, Mask):
        return min(elements, 2 if 0 < law.share < 1 else 1)
    if law.is_constant or not isinstance(law.base, Integers):
        return 1 if law.is_constant else elements
    choices = max(law.base.high - law.base.low, 1)
    if choices == 1:
        return 1
    return max(1, round(-choices * math.expm1(elements * math.log1p(-1 / choices))))


def beyond_tolerance(operator: str, tolerance: float) -> bool | None:
    """Compare an unknown x, which lies beyond small tolerances and equals no number; None if undecided."""
    if operator in ("eq", "ne") and math.isfinite(tolerance):
        return operator == "ne"
    if not 0 < abs(tolerance) <= LARGEST_TOLERANCE:
        return None
    return _COMPARE[operator](2 * tolerance, tolerance)


# Operators by name

Operand = Law | float | None


def derive(operator: str, operands: Sequence[Operand]) -> Law | None:
    """Return the law of an operator's result from the laws of its operands, or None if it is unknown."""
    first, second = (*operands, None, None)[:2]
    second = second.mean if isinstance(second, Sample) and second.is_constant else second
    if operator in _COMPARE:
        if isinstance(second, Sample | Mask) and isinstance(first, float):
            first, second, operator = second, first, _MIRRORED[operator]
        return (
            compare(operator, first, second) if isinstance(first, Sample | Mask) and isinstance(second, float) else None
        )
    if operator in _LOGIC and isinstance(first, Mask):
        return _LOGIC[operator](first, second)
    if operator in ("index", "index_select", "gather", "flip", "roll") and isinstance(first, Mask):
        return mask_of_share(first.share)
    return _arithmetic(operator, first, second, operands[2] if len(operands) > 2 else 1.0)


def _logic_of_two(combine: Callable[[Mask, Mask], Mask]) -> Callable[[Mask, Operand], Mask | None]:
    return lambda first, second: combine(first, second) if isinstance(second, Mask) else None


_LOGIC: dict[str, Callable[[Mask, Operand], Mask | None]] = {
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__", "mul"), _logic_of_two(both)),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _logic_of_two(either)),
    **dict.fromkeys(
        ("bitwise_xor", "logical_xor", "__xor__"),
        _logic_of_two(lambda a, b: both(either(a, b), negated(both(a, b)))
                      if a.source == b.source else mask_of_share(a.share + b.share - 2 * a.share * b.share)),
    ),
    **dict.fromkeys(("bitwise_not", "logical_not"), lambda first, _: negated(first)),
}  # fmt: skip


def _arithmetic(operator: str, first: Operand, second: Operand, alpha: Operand) -> Law | None:
    step = alpha if isinstance(alpha, float) else 1.0
    if isinstance(first, Sample | Mask) and operator == "neg":
        return scaled(first, -1.0, 0.0)
    if isinstance(second, Sample | Mask) and isinstance(first, float):
        by = {"add": (step, first), "mul": (first, 0.0), "sub": (-step, first)}.get(operator)
        return scaled(second, *by) if by else None
    if not isinstance(first, Sample | Mask) or not isinstance(second, float):
        return None
    by = {
        "add": (1.0, second * step), "sub": (1.0, -second * step), "mul": (second, 0.0),
        "div": (1 / second if second else math.nan, 0.0), "rsub": (-step, second),
    }.get(operator)  # fmt: skip
    return scaled(first, *by) if by and not math.isnan(by[0]) else None


def reduced(operator: str, law: Mask, elements: int) -> float | None:
    """Return the result of reducing a mask of `elements`, if the share determines it."""
    number = law.count(elements)
    answers = {"sum": number, "mean": law.share, "any": number > 0, "all": number == elements, "count_nonzero": number}
    return float(answers[operator]) if operator in answers else None


_SAMPLERS = frozenset("uniform_ normal_ random_ bernoulli_ fill_ zero_".split())
_WHOLE = frozenset("Byte Char Short Int Long".split())


class Laws:
    """What is assumed about the tensors of one session: laws by the numbers that blocks carry.

    0 means no law; beyond `MOST_LAWS` the oldest are dropped.
    """

    def __init__(self) -> None:
        self._laws: dict[int, Law] = {}
        self._numbers = count(1)

    def add(self, law: Law | None) -> int:
        """Store a law and return its number (0 for None)."""
        if law is None:
            return 0
        number = next(self._numbers)
        self._laws[number] = law
        if len(self._laws) > MOST_LAWS:
            del self._laws[next(iter(self._laws))]
        return number

    def of(self, number: int) -> Law | None:
        """Return the law with this number, if any."""
        return self._laws.get(number)

    def follow(
        self, name: str, operands: Sequence[Any], elements: int, results: int, dtype: str
    ) -> tuple[int, float | None]:
        """Return the number of the law of an operator's result, and its value if all elements are equal.

        The native library reports operators that sample, compare and copy, one call at a time. An operand is a law's
        number (int), a number (float), the mean of known values (a tuple), or None.
        """
        operator = name.partition("::")[2]
        if operator == "share":
            return self.add(mask_of_share(operands[0])), None
        if operator in _SAMPLERS:
            numbers: list[float | None] = []
            for operand in operands[1:]:
                # The probability of `bernoulli` is the mean of a tensor's values.
                value = self.of(operand) if isinstance(operand, int) else operand
                value = value.share if isinstance(value, Mask) else value.mean if isinstance(value, Sample) else value
                numbers.append(value[0] if isinstance(value, tuple) else value)
            law = sample(operator, numbers)
            return self.add(as_mask(law) if law and dtype == "Bool" else law), None
        known: list[Operand] = [
            self.of(operand) if isinstance(operand, int) else operand if isinstance(operand, float) else None
            for operand in operands
        ]
        first = known[0]
        if operator == "copy_":
            if first is None or isinstance(first, float):
                return 0, None
            return self.add(
                as_mask(first) if dtype == "Bool" else as_integers(first) if dtype in _WHOLE else first
            ), None
        operator = operator.rstrip("_") if not operator.startswith("__") else operator
        if isinstance(first, Mask) and results:
            total = reduced(operator, first, elements // results)
            if total is not None:
                return 0, total
        return self.add(derive(operator, known)), None

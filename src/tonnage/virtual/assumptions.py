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
from operator import and_, eq, ge, gt, le, lt, ne, or_, xor
from typing import Any

_sources = count(1)
MOST_LAWS = 1 << 16
# An unknown number compared with a tolerance this small counts as beyond it, so that convergence loops keep running.
LARGEST_TOLERANCE = 1e-4


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

    def __invert__(self) -> "Mask":
        edges = [0.0, *(edge for interval in self.intervals for edge in interval), 1.0]
        return Mask(self.source, tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b))

    def __and__(self, other: "Mask") -> "Mask":
        if self.source != other.source:
            return mask_of_share(self.share * other.share)
        parts = ((max(a, c), min(b, d)) for a, b in self.intervals for c, d in other.intervals)
        return Mask(self.source, tuple((start, end) for start, end in parts if start < end))

    def __or__(self, other: "Mask") -> "Mask":
        return ~(~self & ~other)

    def __xor__(self, other: "Mask") -> "Mask":
        if self.source != other.source:
            return mask_of_share(self.share + other.share - 2 * self.share * other.share)
        return (self | other) & ~(self & other)


Law = Sample | Mask


def mask_of_share(share: float) -> Mask:
    """Return a mask of a new source with this share of true elements."""
    return Mask(next(_sources), ((0.0, share),) if share > 0 else ())


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


_COMPARE: dict[str, Callable[[float, float], bool]] = {f.__name__: f for f in (gt, ge, lt, le, eq, ne)}
_MIRRORED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}


def compare(operator: str, law: Law, number: float) -> Mask:
    """Return the law of a comparison such as `law > number`."""
    if isinstance(law, Mask):
        if_true, if_false = (_COMPARE[operator](value, number) for value in (1.0, 0.0))
        if if_true == if_false:
            return Mask(law.source, ((0.0, 1.0),) if if_true else ())
        return law if if_true else ~law
    under, up_to = law.below(number, False), law.below(number, True)
    start, end = under if operator in ("eq", "ne") else 0.0, under if operator in ("lt", "ge") else up_to
    if law.scale < 0:  # reverses the order of the source's quantiles
        start, end = 1 - end, 1 - start
    mask = Mask(law.source, ((start, end),) if start < end else ())
    return ~mask if operator in ("gt", "ge", "ne") else mask


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


Operand = Law | float | None
_LOGIC: dict[str, Callable[[Mask, Mask], Mask]] = {
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__", "mul"), and_),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), or_),
    **dict.fromkeys(("bitwise_xor", "logical_xor", "__xor__"), xor),
}


def derive(operator: str, operands: Sequence[Operand]) -> Law | None:
    """Return the law of an operator's result from the laws of its operands, or None if it is unknown."""
    first, second, alpha = (*operands, None, None, None)[:3]
    second = second.mean if isinstance(second, Sample) and second.is_constant else second
    # A law and a number, in either order.
    is_mirrored = isinstance(first, float) and isinstance(second, Law)
    law, number = (second, first) if is_mirrored else (first, second)
    if not isinstance(law, Law):
        return None
    if operator in _COMPARE:
        by = _MIRRORED[operator] if is_mirrored else operator
        return compare(by, law, number) if isinstance(number, float) else None
    if isinstance(first, Mask):
        if operator in _LOGIC:
            return _LOGIC[operator](first, second) if isinstance(second, Mask) else None
        if operator in ("bitwise_not", "logical_not"):
            return ~first
        if operator in ("index", "index_select", "gather", "flip", "roll"):
            return mask_of_share(first.share)
    if operator == "neg":
        return scaled(law, -1.0, 0.0)
    if not isinstance(number, float):
        return None
    step = alpha if isinstance(alpha, float) else 1.0
    if is_mirrored:
        linear = {"add": (step, number), "mul": (number, 0.0), "sub": (-step, number)}
    else:
        linear = {
            "add": (1.0, number * step), "sub": (1.0, -number * step), "mul": (number, 0.0),
            "div": (1 / number if number else math.nan, 0.0), "rsub": (-step, number),
        }  # fmt: skip
    factor, summand = linear.get(operator, (math.nan, 0.0))
    return None if math.isnan(factor) else scaled(law, factor, summand)


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
        values = [self.of(operand) if isinstance(operand, int) else operand for operand in operands]
        if operator in _SAMPLERS:
            numbers: list[float | None] = []
            for value in values[1:]:
                # The probability of `bernoulli` is the mean of a tensor's values.
                mean = value.share if isinstance(value, Mask) else value.mean if isinstance(value, Sample) else value
                numbers.append(mean[0] if isinstance(mean, tuple) else mean)
            law = sample(operator, numbers)
            return self.add(as_mask(law) if law and dtype == "Bool" else law), None
        known: list[Operand] = [None if isinstance(value, tuple) else value for value in values]
        first = known[0]
        if operator == "copy_":
            if first is None or isinstance(first, float):
                return 0, None
            law = as_mask(first) if dtype == "Bool" else as_integers(first) if dtype in _WHOLE else first
            return self.add(law), None
        if isinstance(first, Mask) and results:
            total = reduced(operator.rstrip("_"), first, elements // results)
            if total is not None:
                return 0, total
        return self.add(derive(operator if operator.startswith("__") else operator.rstrip("_"), known)), None

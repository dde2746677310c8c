"""The laws of a session's tensors: which operators sample, compare and copy, told by the native half one call at a time.

How laws follow from each other is written in `assumptions`; here they have the numbers that blocks carry.
"""

from collections.abc import Sequence
from typing import Any

from tonnage.virtual.assumptions import (
    Law,
    Mask,
    Operand,
    Records,
    Sample,
    as_integers,
    as_mask,
    derive,
    mask_of_share,
    reduced,
    sample,
)

_SAMPLERS = frozenset("uniform_ normal_ random_ bernoulli_ fill_ zero_".split())
_WHOLE = frozenset("Byte Char Short Int Long".split())


class Laws:
    """What is assumed of the tensors of one session."""

    def __init__(self) -> None:
        self.records = Records()

    def follow(
        self, name: str, operands: Sequence[Any], elements: int, results: int, dtype: str
    ) -> tuple[int, float | None]:
        """The law of an operator's result, by its number, and its value where all its elements are that.

        An operand is a law (its number), a number, the mean of known values (a tuple), or None.
        """
        operator = name.partition("::")[2]
        if operator == "share":
            return self.records.add(mask_of_share(operands[0])), None
        if operator in _SAMPLERS:
            numbers: list[float | None] = []
            for operand in operands[1:]:
                # The probabilities of `bernoulli` are the mean of what a tensor holds.
                value = self.records.find(operand) if isinstance(operand, int) else operand
                value = value.share if isinstance(value, Mask) else value.mean if isinstance(value, Sample) else value
                numbers.append(value[0] if isinstance(value, tuple) else value)
            law = sample(operator, numbers)
            return self.records.add(as_mask(law) if law and dtype == "Bool" else law), None
        known: list[Operand] = [
            self.records.find(operand) if isinstance(operand, int) else operand if isinstance(operand, float) else None
            for operand in operands
        ]
        if operator == "copy_":
            return self.records.add(_converted(known[0], dtype)), None
        operator = operator.rstrip("_") if not operator.startswith("__") else operator
        if isinstance(known[0], Mask) and results:
            total = reduced(operator, known[0], elements // results)
            if total is not None:
                return 0, total
        return self.records.add(derive(operator, known)), None

    def of(self, number: int) -> Law | None:
        """The law of this number."""
        return self.records.find(number)


def _converted(law: Operand, dtype: str) -> Law | None:
    """The law of a copy in another type."""
    if law is None or isinstance(law, float):
        return None
    if dtype == "Bool":
        return as_mask(law)
    return as_integers(law) if dtype in _WHOLE else law

"""The laws of a session's tensors. The native library reports operators that sample, compare and copy, one call at a
time.

`assumptions` has the rules; here laws get the numbers that blocks carry.
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
    """What is assumed about the tensors of one session."""

    def __init__(self) -> None:
        self.records = Records()

    def follow(
        self, name: str, operands: Sequence[Any], elements: int, results: int, dtype: str
    ) -> tuple[int, float | None]:
        """Return the number of the law of an operator's result, and its value if all elements are equal.

        An operand is a law's number (int), a number (float), the mean of known values (a tuple), or None.
        """
        operator = name.partition("::")[2]
        if operator == "share":
            return self.records.add(mask_of_share(operands[0])), None
        if operator in _SAMPLERS:
            numbers: list[float | None] = []
            for operand in operands[1:]:
                # The probability of `bernoulli` is the mean of a tensor's values.
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
        """Return the law with this number."""
        return self.records.find(number)


def _converted(law: Operand, dtype: str) -> Law | None:
    if law is None or isinstance(law, float):
        return None
    if dtype == "Bool":
        return as_mask(law)
    return as_integers(law) if dtype in _WHOLE else law

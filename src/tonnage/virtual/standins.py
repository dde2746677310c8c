"""Placeholder values for what a script reads from a GPU that computes nothing; they are counted and reported.

They keep the script on its normal path: a loss is finite and falls, a gradient's norm is about 1, no flag is set. A
loop that waits for a flag would never end, so a line that has read the same flag very often gets the other answer.
"""

from collections import Counter
from collections.abc import Callable

from tonnage.recording.records import Note, NoteKind, StandIn

PATIENCE = 20_000
# A number read repeatedly at the same line falls towards 1 from this much above it, so that code that waits until a
# loss no longer changes, such as L-BFGS, continues. It never falls below 1, so that sizes computed from it stay
# valid.
FALL = 1e-3
_FLOATS = {"Float", "Double", "Half", "BFloat16"}


class StandIns:
    """Counts values that were read, by kind and line."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._reads: Counter[tuple[str, str, str]] = Counter()
        self._notes: Counter[tuple[NoteKind, str, str]] = Counter()

    def read(self, dtype: str, count: int) -> float:
        """Return a value for a read (`count` elements of a tensor, or -1 for one scalar), and count it."""
        line = self._line()
        what = "scalar" if count < 0 else f"tensor of {count:,}"
        before = self._reads[what, dtype, line]
        if count >= 0:
            value = 1.0
        elif dtype in _FLOATS:
            value = 1.0 + FALL / (1 + before)
        else:
            value = float(before % PATIENCE == PATIENCE - 1)
        self._reads[what, dtype, line] += 1
        return value

    def unmodelled(self, operator: str, why: str) -> None:
        """Note an operator that is not modelled."""
        self._notes["not_modelled", operator, why.split("\n")[0][:160]] += 1

    def assume(self, operator: str, text: str) -> None:
        """Note an assumption about data."""
        self._notes["assumption", operator, text] += 1

    def records(self) -> list[StandIn]:
        """Return one row for each kind and line, most frequent first."""
        rows = []
        for (what, dtype, line), count in self._reads.most_common():
            shown = "1" if dtype in _FLOATS or what != "scalar" else "False" if dtype == "Bool" else "0"
            rows.append(StandIn(f"{what} {dtype.lower()}", line, count, shown))
        return rows

    def notes(self) -> list[Note]:
        """Return what is not modelled and what was assumed."""
        return [Note(kind, operator, count, text) for (kind, operator, text), count in self._notes.most_common()]

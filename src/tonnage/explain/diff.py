"""What grew from one run to another, at their peaks: by category, module and source line.

The runs may come from any source, so that a prediction and a measurement of one script compare line by line. Similar
layers count as one module. Differences are judged only against a given limit.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tonnage.errors import BadSize
from tonnage.recording import Allocation, Recording, module_pattern, telling_lines
from tonnage.units import parse_bytes

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of one name in both runs."""

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def grew_bytes(self) -> int:
        """Bytes added by the second run."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class RunDifference:
    """Two runs side by side; each list is sorted by the size of the change."""

    peaks: tuple[Growth, ...]
    phases: tuple[Growth, ...]
    categories: tuple[Growth, ...]
    modules: tuple[Growth, ...]
    lines: tuple[Growth, ...]


@dataclass(frozen=True, slots=True)
class GrowthLimit:
    """How much a peak may grow: bytes, or a share of its former size."""

    text: str
    size_bytes: int = 0
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "GrowthLimit":
        """Parse "512 MiB" or "5%"."""
        percent = _PERCENT.fullmatch(text)
        if percent:
            return cls(text, share=float(percent[1]) / 100)
        try:
            return cls(text, parse_bytes(text))
        except BadSize:
            problem = f"{text!r} is neither a size nor a percentage."
            raise BadSize(problem, hint="Write it like 512MiB, 2GiB or 5%.") from None

    def is_passed_by(self, growth: Growth) -> bool:
        """Say whether it grew by more than this."""
        allowed = self.size_bytes if self.share is None else self.share * growth.before_bytes
        return growth.grew_bytes > allowed


def compare(before: Recording, after: Recording) -> RunDifference:
    """Compare the first run with the second."""
    # The peak of each phase of either run.
    first, second = ({phase.name: phase.peak_allocated_bytes for phase in run.phases} for run in (before, after))
    # The script's lines, or the library's if one leads into several of them in either run. If a source knows only the
    # script's lines, only those are compared.
    places = [{(a.line, a.stack[:1]) for a in run.live_at_peak} for run in (before, after)]
    names: dict[tuple[str, tuple[str, ...]], str] = {}
    if all(any(stack and stack[0] != line for line, stack in known) for known in places):
        every = sorted(set().union(*places))
        names = dict(zip(every, telling_lines(every), strict=True))
    return RunDifference(
        peaks=(
            Growth("allocated", before.peak_allocated_bytes, after.peak_allocated_bytes),
            Growth("reserved", before.peak_reserved_bytes, after.peak_reserved_bytes),
            Growth("process", before.peak_process_bytes, after.peak_process_bytes),
        ),
        phases=_ranked(first, second),
        categories=_by(before, after, lambda a: a.category.value),
        modules=_by(before, after, lambda a: module_pattern(a.module)),
        lines=_by(before, after, lambda a: names.get((a.line, a.stack[:1]), a.line)),
    )


def passes(difference: RunDifference, limit: GrowthLimit) -> bool:
    """Say whether a peak, of allocated or reserved memory, grew by more than the limit."""
    return any(limit.is_passed_by(growth) for growth in difference.peaks[:2])


def _by(before: Recording, after: Recording, name_of: Callable[[Allocation], str]) -> tuple[Growth, ...]:
    sums: list[Counter[str]] = []
    for recording in (before, after):
        sums.append(Counter())
        for a in recording.live_at_peak:
            sums[-1][name_of(a)] += a.block_bytes
    return _ranked(*sums)


def _ranked(first: dict[str, int], second: dict[str, int]) -> tuple[Growth, ...]:
    rows = [Growth(name, first.get(name, 0), second.get(name, 0)) for name in {**first, **second}]
    return tuple(sorted(rows, key=lambda row: (-abs(row.grew_bytes), -row.after_bytes, row.name)))

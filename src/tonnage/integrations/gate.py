"""A limit on the GPU memory of one test, and the message when it is exceeded. Independent of pytest."""

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tonnage.explain import advise
from tonnage.integrations.meter import Meter
from tonnage.recording import Recording
from tonnage.recording.replay import demand
from tonnage.report.runs.terminal import largest, ledger
from tonnage.units import GIB, MIB, format_bytes


@dataclass(frozen=True)
class MemoryGate:
    """A test's meter, opened before its fixtures and closed after them, and its limit, checked in between."""

    meter: Meter
    limit_bytes: int
    script: Path

    def words(self, error: BaseException | None = None) -> str:
        """Return the report: needed bytes, limit, the largest terms, the line, and one change."""
        recording = self.meter.recording(error)
        recording.header.script = str(self.script)
        return "\n".join(_words(recording, self.meter.peak_bytes(), self.limit_bytes))


def _words(recording: Recording, needed_bytes: int, limit_bytes: int) -> Iterator[str]:
    excess_bytes = needed_bytes - limit_bytes
    unit = "GiB" if limit_bytes >= GIB // 4 else "MiB"
    needed, limit = format_bytes(needed_bytes, unit), format_bytes(limit_bytes, unit)
    least = "at least " if recording.oom else ""
    yield f"GPU memory: needed {least}{needed}, limit {limit}: {format_bytes(max(0, excess_bytes), unit)} too much"
    yield f"  {_peak(recording)}"
    header = recording.header
    kind = "virtual" if header.source == "virtual" else "measured"
    yield f"  on {header.gpu_name}, {format_bytes(header.capacity_bytes, 'GiB')}, {kind}"
    yield ""
    whole = demand(recording)
    for section in (ledger(whole), largest(whole)):
        yield from (line.plain for line in section)
        yield ""
    yield from _change(recording, needed_bytes, excess_bytes, unit)


def _peak(recording: Recording) -> str:
    """Return the phase and line of the peak or, if the test died, of the failed request."""
    at = recording.oom or recording.peak_allocation
    if at is None:
        return "nothing was allocated"
    kind = "out of memory" if recording.oom else "peak"
    name, _, number = at.line.rpartition(":")
    source = ""
    if name == Path(recording.header.script).name and number.isdigit():
        source = linecache.getline(recording.header.script, int(number)).strip()
    words = f"{kind}{f' in {at.phase}' if at.phase else ''}{f' at {at.line}' if at.line else ''}"
    return f"{words}  {source}".rstrip()


def _change(recording: Recording, needed_bytes: int, excess_bytes: int, unit: str) -> Iterator[str]:
    """Yield the change that is enough, else the one that saves most, and the limit that would be needed."""
    fixes = advise(recording).fixes
    # Of those that are enough, the first is the one that `advise` ranks best.
    largest_fix = max(fixes, key=lambda fix: fix.saves_bytes, default=None)
    fix = next((fix for fix in fixes if fix.saves_bytes >= excess_bytes), largest_fix)
    if fix:
        saves = f"saves {format_bytes(fix.saves_bytes, unit)}, costs {fix.costs}"
        enough = "" if fix.saves_bytes >= excess_bytes else " (not enough alone)"
        yield f"  to save memory: {fix.change}: {saves}{enough}"
        yield f"    {fix.how}"
    # A limit that a person would write: tenths of a GiB, whole MiB.
    limit = f"{-(-needed_bytes * 10 // GIB) / 10} GiB" if unit == "GiB" else f"{-(-needed_bytes // MIB)} MiB"
    yield f'  if it is meant to need this much: limit="{limit}"'

"""The moment at which a phase needs most, and what was alive then, for rules about evaluation, saving and the like."""

from collections.abc import Collection

from tonnage.explain.case import Case, live_at
from tonnage.recording import Allocation
from tonnage.recording.timeline import name_at, spans

WORTH_SHARE = 0.05


def spans_of(case: Case, phases: Collection[str]) -> list[tuple[int, int]]:
    """Return (first event, event after the last) of each stretch of these phases."""
    length = len(case.needed.timeline.allocated_bytes)
    return [(start, end) for name, start, end in spans(case.recording.marks, "phase", length) if name in phases]


def moment_of(case: Case, phases: Collection[str]) -> int | None:
    """Return the decisive moment if it is in one of these phases, else their peak; None without them."""
    if name_at(case.recording.marks, "phase", case.moment) in phases:
        return case.moment
    levels = case.needed.timeline.allocated_bytes
    highest = [max(range(start, end), key=levels.__getitem__) for start, end in spans_of(case, phases)]
    return max(highest, key=levels.__getitem__, default=None)


def live_in(case: Case, phases: Collection[str]) -> list[Allocation]:
    """Return the blocks alive at the peak of these phases."""
    moment = moment_of(case, phases)
    return [] if moment is None else live_at(case.needed, moment)


def waste_of(case: Case, blocks: Collection[Allocation]) -> int:
    """Return what would have been free at the failure without these blocks; those freed earlier count 0."""
    numbers = {a.index for a in blocks}
    return sum(a.block_bytes for a in case.live if a.index in numbers) if case.death else 0


def is_worth(case: Case, size_bytes: int) -> bool:
    """Say whether it is a large share of all that the run needs."""
    return size_bytes >= WORTH_SHARE * case.peak_bytes

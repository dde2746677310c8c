"""Varying lengths: a line requests another size at every iteration, so freed blocks do not fit again."""

from bisect import bisect_right

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, Guilty
from tonnage.units import MIB, format_bytes

_TURNS = 6
_DISTINCT_SHARE = 0.5
_UNUSED_SHARE = 0.15
_MIN_BLOCK_BYTES = MIB


def varying_lengths(case: Case) -> Finding | None:
    """Return the lines whose largest request varies, if much of the reserved memory is unused."""
    reserved = case.recording.peak_reserved_bytes
    unused = case.death.unused_bytes if case.death else case.recording.unused_at_peak_bytes
    lines = _varying(case)
    if not lines or unused < _UNUSED_SHARE * reserved:
        return None
    first = lines[0]
    sentence = (
        f"requests vary from turn to turn ({first.what} at {first.line}), so freed blocks do not fit the next ones"
    )
    return Finding("varying-lengths", sentence, unused, lines=tuple(lines[:3]))


def _varying(case: Case) -> list[Guilty]:
    largest: dict[str, dict[int, int]] = {}
    for a in case.recording.allocations:
        if a.block_bytes >= _MIN_BLOCK_BYTES and (turn := bisect_right(case.turns, a.born)):
            of_line = largest.setdefault(a.line, {})
            of_line[turn] = max(of_line.get(turn, 0), a.requested_bytes)
    rows = []
    for line, by_turn in largest.items():
        sizes, distinct = by_turn.values(), len(set(by_turn.values()))
        if len(sizes) >= _TURNS and distinct >= _DISTINCT_SHARE * len(sizes):
            words = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
            rows.append(Guilty(line, max(sizes), distinct, words))
    return sorted(rows, key=lambda row: -row.size_bytes)

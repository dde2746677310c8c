"""Batches on their way: those that wait on the GPU beside the one at work, because a loader fetches ahead or a name holds them."""

from collections.abc import Iterator
from dataclasses import replace

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.phases import is_worth, waste_of
from tonnage.explain.rewrites import Rewrite
from tonnage.recording import Allocation
from tonnage.recording.recording import is_copied_batch
from tonnage.units import format_bytes


def waiting_batches(case: Case) -> Finding | None:
    """Inputs of one line at the moment that matters: all but the latest of each line wait, or are held."""
    by_place = _batches(case.live)
    extra = [a for members in by_place.values() for a in members[:-1]]
    size = sum(a.block_bytes for a in extra)
    if not is_worth(case, size):
        return None
    batches = max(map(len, by_place.values()))
    lines = guilty_lines(extra)
    one_at_a_time = {a.index: a for members in _batches(case.needed.allocations).values() for a in _in_turn(members)}
    changed = [one_at_a_time.get(a.index, a) for a in case.needed.allocations]
    fix = fix_of(
        case.needed,
        Rewrite("one batch at a time", "perhaps a wait", "del the batch after its step, or prefetch fewer", changed),
    )
    sentence = f"{batches} batches are on the GPU at once, {format_bytes(size)} beside the one at work{lines_words(lines)}"
    return Finding("waiting-batches", sentence, size, "data", waste_of(case, extra), lines, (fix,) if fix else ())


def _batches(blocks: list[Allocation]) -> dict[tuple[str, ...], list[Allocation]]:
    """Inputs that came from the host and go again, in order of birth, by the lines that asked for them."""
    found: dict[tuple[str, ...], list[Allocation]] = {}
    for a in blocks:
        if is_copied_batch(a) and a.died is not None:
            found.setdefault(a.stack or (a.line,), []).append(a)
    return found


def _in_turn(members: list[Allocation]) -> Iterator[Allocation]:
    """Each from when the one before it is gone."""
    free_from = 0
    for a in members:
        assert a.died is not None
        yield replace(a, born=free_from) if a.born < free_from < a.died else a
        free_from = max(free_from, a.died)

"""Batches waiting on the GPU beside the one in use.

A loader prefetches, or a name still holds the last batch. What waits when a run ends was never used and is not
classified as an input; it is recognized by the line that made it. Also data sets kept on the GPU for the whole run, of
which a step needs a part.
"""

from collections.abc import Iterator
from dataclasses import replace

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.phases import is_worth, waste_of
from tonnage.explain.rewriting import Rewrite
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.recording.recording import is_copied_batch
from tonnage.units import format_bytes

_BATCH = (Category.INPUTS, Category.OTHER)


def waiting_batches(case: Case) -> Finding | None:
    """Return inputs that one line made at the decisive moment: all but the latest of each line wait or are held."""
    batches = _batches(case.needed.allocations)
    there = {a.index for a in case.live}
    at_once = [[a for a in members if a.index in there] for members in batches]
    extra = [a for members in at_once for a in members[:-1]]
    size = sum(a.block_bytes for a in extra)
    if not is_worth(case, size):
        return None
    end = len(case.needed.timeline.allocated_bytes)
    in_turn = {a.index: a for members in batches for a in _in_turn(members, end)}
    changed = [in_turn.get(a.index, a) for a in case.needed.allocations]
    how = "del the batch after its step, or prefetch fewer"
    fix = fix_of(case.needed, Rewrite("one batch at a time", "perhaps a wait", how, changed))
    lines, count = guilty_lines(extra), max(map(len, at_once))
    sentence = (
        f"{count} batches are on the GPU at once, {format_bytes(size)} beside the one at work{lines_words(lines)}"
    )
    return Finding("waiting-batches", sentence, size, "data", waste_of(case, extra), lines, (fix,) if fix else ())


def _batches(blocks: list[Allocation]) -> list[list[Allocation]]:
    """Return inputs copied from the host, in order of allocation, by what requested them, without resident data sets."""
    places = {(a.stack, a.line, a.operator) for a in blocks if is_copied_batch(a)}
    found: dict[tuple[tuple[str, ...], str, str], list[Allocation]] = {place: [] for place in places}
    for a in blocks:
        if a.category in _BATCH and (place := (a.stack, a.line, a.operator)) in found:
            found[place].append(a)
    return [members for members in found.values() if sum(a.died is None for a in members) <= len(members) / 2]


def _in_turn(members: list[Allocation], end: int) -> Iterator[Allocation]:
    """Yield each batch, starting only after the previous one is freed."""
    free_from = 0
    for a in members:
        dies = end if a.died is None else a.died
        yield replace(a, born=min(free_from, dies - 1)) if a.born < free_from else a
        free_from = max(free_from, dies)


def resident_data(case: Case) -> Finding | None:
    """Return data alive from before the first iteration until after the last."""
    if not case.turns:
        return None
    begins = case.recording.begins_at  # older blocks may be anything, most likely a model
    first, last = case.turns[0], case.turns[-1]
    early = [a for a in case.live if a.category in _BATCH and begins <= a.born < first and a.phase in ("", "setup")]
    stays = [a for a in early if a.died is None or a.died > last]
    size = sum(a.block_bytes for a in stays)
    if not is_worth(case, size):
        return None
    lines = guilty_lines(stays)
    gone = {a.index for a in stays}
    kept = [a for a in case.needed.allocations if a.index not in gone]
    how = 'leave it on the host, and move one batch at a time: batch.to("cuda", non_blocking=True)'
    fix = fix_of(case.needed, Rewrite("data on the host", "a copy each step", how, kept))
    sentence = f"{format_bytes(size)} of data are on the GPU for the whole run{lines_words(lines)}"
    return Finding("resident-data", sentence, size, lines=lines, fixes=(fix,) if fix else ())

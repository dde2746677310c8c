"""Data kept on the GPU: what the script put there before its loop, and is no part of a model."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.rewriting import Rewrite
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_WORTH_SHARE = 0.05
_DATA = (Category.OTHER, Category.INPUTS)


def resident_data(case: Case) -> Finding | None:
    """The bytes that are there from before the first turn until after the last."""
    if not case.turns:
        return None
    begins = case.recording.begins_at  # what is older may be anything: a model, most likely
    stays = [a for a in case.live if a.born >= begins and _is_resident(a, case.turns[0], case.turns[-1])]
    size = sum(a.block_bytes for a in stays)
    if size < _WORTH_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(stays)
    gone = {a.index for a in stays}
    kept = [a for a in case.needed.allocations if a.index not in gone]
    how = 'leave it on the host, and move one batch at a time: batch.to("cuda", non_blocking=True)'
    fix = fix_of(case.needed, Rewrite("data on the host", "a copy each step", how, kept))
    sentence = f"{format_bytes(size)} of data are on the GPU for the whole run{lines_words(lines)}"
    return Finding("resident-data", sentence, size, lines=lines, fixes=(fix,) if fix else ())


def _is_resident(a: Allocation, first: int, last: int) -> bool:
    return a.category in _DATA and a.born < first and (a.died is None or a.died > last) and a.phase in ("", "setup")

"""Findings of the rules, and memory-saving changes, computed from a run's own events and ranked by bytes.

A finding has a sentence, its bytes, the responsible lines, and fixes. One that names a cause may be why a run failed;
otherwise it is evidence.

Each fix rewrites the recording's allocations as the change would (`explain.rewrites`); the saving is the difference of
the two peaks, so a second peak that remains counts. If the run failed, the failed request is part of the demand, and
the rewritten events are replayed through the allocator to see whether they fit. Stated costs in time are rules of
thumb, not measurements; nothing here applies a change.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.explain.case import Case, is_limited_by_itself, needed_of
from tonnage.explain.rewrites import REWRITES
from tonnage.explain.rewriting import Rewrite
from tonnage.explain.total import Total, total_of
from tonnage.hardware import all_gpus
from tonnage.hardware.catalogue import cuda_cards, first_that_holds
from tonnage.recording import Allocation, Recording, telling_lines
from tonnage.recording.replay import outcome_on
from tonnage.recording.timeline import MemoryTimeline
from tonnage.units import MIB, format_bytes

_WORTH_SHARE = 0.01
_WORTH_UNUSED_SHARE = 0.05
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Fix:
    """A change, the bytes it takes off the peak, its cost, and how to make it.

    `rescues`: whether the whole run fits with it or, if only its beginning is known, whether it gets past the failed
    request; None if it did not fail. `was_run`: whether the script was run with the change (`explain.trial`) instead of
    computed from the recording.
    """

    change: str
    saves_bytes: int
    costs: str
    how: str
    rescues: bool | None = None
    was_run: bool = False


@dataclass(frozen=True, slots=True)
class Climb:
    """Steps that each need more than the one before: by how much, and the step that would not fit, if known."""

    each_bytes: int
    dies_at_step: int | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outlook of a run that completed (`explain.diagnosis`): sentences, whether it climbs, and fixes."""

    lines: tuple[str, ...] = ()
    climb: Climb | None = None
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """Fixes, best first; for a failed run the smallest card that holds it, why it failed, and its total.

    If the total is unknown, the card gets past the failed request. For a completed run, its outlook.
    """

    fixes: tuple[Fix, ...] = ()
    larger_card: str | None = None
    why: str = ""
    total: Total | None = None
    outlook: Outlook = Outlook()


def advise(recording: Recording) -> Advice:
    """Return the changes worth making: those that rescue the run first, then by bytes saved."""
    needed = needed_of(recording)
    rewrites = filter(None, (rewrite_of(needed) for rewrite_of in REWRITES))
    found = [*(fix_of(needed, rewrite) for rewrite in rewrites), expandable_segments(recording)]
    fixes = sorted(filter(None, found), key=lambda fix: (not fix.rescues, -fix.saves_bytes))
    if not _died(needed) or is_limited_by_itself(recording):
        return Advice(tuple(fixes), total=total_of(recording))
    # The smallest card that holds it, preferably of its own family.
    larger = cuda_cards(needed.header.capacity_bytes)
    family = next((card.family for card in all_gpus() if card.key == needed.header.gpu), "")
    kinds = ([card for card in larger if card.family == family], larger)
    holding = (first_that_holds(cards, lambda card: outcome_on(needed, card).failed is None) for cards in kinds)
    card = next(filter(None, holding), None)
    return Advice(tuple(fixes), card.key if card else None, total=total_of(recording))


def _died(needed: Recording) -> bool:
    return needed.header.outcome == "oom"


def fix_of(needed: Recording, rewrite: Rewrite) -> Fix | None:
    """Return what a rewrite takes off the peak of all that a run needs; None if it is not worth making."""
    peak = needed.peak_allocated_bytes
    saved = peak - max(MemoryTimeline.of(rewrite.allocations, []).allocated_bytes)
    if saved < max(_WORTH_SHARE * peak, MIB):
        return None
    rescues = None
    if _died(needed):
        rescues = outcome_on(replace(needed, allocations=rewrite.allocations)).failed is None
    return Fix(rewrite.change, saved, rewrite.costs, rewrite.how, rescues)


def expandable_segments(recording: Recording) -> Fix | None:
    """Return what they save of unused reserved memory; tried if that is large or the run failed."""
    little = recording.unused_at_peak_bytes < _WORTH_UNUSED_SHARE * recording.peak_reserved_bytes
    if _EXPANDABLE in recording.header.settings or (little and not _died(recording)):
        return None
    return allocator_fix(recording, _EXPANDABLE)


def allocator_fix(recording: Recording, configuration: str) -> Fix | None:
    """Return what a setting takes off the reserved peak, by replaying every request; None if too little."""
    needed, died = needed_of(recording), _died(recording)
    settings = ",".join(filter(None, [needed.header.settings, configuration]))
    after = outcome_on(needed, settings=settings)
    rescues = after.failed is None if died else None
    saved = max(0, needed.own_peak_reserved_bytes - after.peak_reserved_bytes)
    # A run that failed again reserved less because it ended early, not because the setting helped.
    if not (rescues if died else saved >= max(_WORTH_SHARE * needed.peak_reserved_bytes, MIB)):
        return None
    name = configuration.partition(":")[0].replace("_", " ")
    is_old = re.match(r"2\.[0-8]\b", needed.header.torch_modelled)  # torch reads another variable since 2.9
    return Fix(name, saved, "nothing", f"PYTORCH_{'CUDA_' if is_old else ''}ALLOC_CONF={settings}", rescues)


Cause = Literal[
    "capacity", "fragmentation", "leak", "outside", "other-process", "pinned-host", "host-memory", "unbounded-cache",
    "evaluation", "generation", "saving", "loading", "data", "none",
]  # fmt: skip

LINES = 5


@dataclass(frozen=True, slots=True)
class Guilty:
    """A line of the script, and its part in the finding."""

    line: str
    size_bytes: int
    count: int = 1
    what: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found.

    `waste_bytes` is what would be free without it; a run that failed because of it lacked less than that.
    """

    rule: str
    sentence: str
    size_bytes: int
    cause: Cause | None = None
    waste_bytes: int = 0
    lines: tuple[Guilty, ...] = ()
    fixes: tuple[Fix, ...] = ()


def finding(
    case: Case,
    rule: str,
    words: str,
    blocks: Collection[Allocation],
    *rewrites: Rewrite,
    cause: Cause | None = None,
    wasted: Collection[Allocation] | None = None,
) -> Finding:
    """Return what a rule found about these blocks; {size} and {at} in its words are their bytes and lines.

    With a cause, `wasted` are the blocks that need not be there (None: all of them).
    """
    size, lines = sum(a.block_bytes for a in blocks), guilty_lines(blocks)
    fixes = tuple(filter(None, (fix_of(case.needed, rewrite) for rewrite in rewrites)))
    # What would have been free at the failure without these blocks; those freed earlier count 0.
    gone = {a.index for a in (blocks if wasted is None else wasted)} if cause and case.death else ()
    waste = sum(a.block_bytes for a in case.live if a.index in gone) if gone else 0
    return Finding(rule, words.format(size=format_bytes(size), at=lines_words(lines)), size, cause, waste, lines, fixes)


def guilty_lines(allocations: Iterable[Allocation]) -> tuple[Guilty, ...]:
    """Return the lines that made these blocks, most bytes first, each describing its largest block.

    A line that leads into several library lines, as a framework's does, is shown as those. Blocks without a line are
    distinguished by category.
    """
    by_place: dict[tuple[str, tuple[str, ...], str], list[Allocation]] = {}
    for a in allocations:
        by_place.setdefault((a.line, a.stack[:1], "" if a.line else a.category.label), []).append(a)
    lines = telling_lines((line, stack) for line, stack, _ in by_place)
    rows = []
    for line, members in zip(lines, by_place.values(), strict=True):
        largest = max(members, key=lambda a: a.block_bytes)
        rows.append(Guilty(line, sum(a.block_bytes for a in members), len(members), tensor_words(largest)))
    return tuple(sorted(rows, key=lambda row: -row.size_bytes)[:LINES])


def tensor_words(a: Allocation) -> str:
    """Describe a block as far as it is known, like "float32 [8192, 50304] _to_copy of lm_head"."""
    shape = "" if a.shape is None else str(list(a.shape))
    maker = " of ".join(filter(None, [a.operator.removeprefix("aten::"), a.module]))
    return " ".join(filter(None, [a.dtype, shape, maker])) or a.category.label


def lines_words(lines: Iterable[Guilty]) -> str:
    """Return " at train.py:12 and train.py:30" for a sentence; empty if no line is known."""
    named = [row.line for row in lines if row.line][:2]
    return f" at {' and '.join(named)}" if named else ""

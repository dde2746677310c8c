"""The timeline of a recording with a bounded number of points.

A short run keeps all events. A long one is cut into stretches, keeping the points where allocated bytes are lowest and
highest, reserved bytes are highest, and each category is highest, so no maximum is lost at any width. Levels are stored
as differences, which are short.
"""

from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate, pairwise
from typing import Any

from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording
from tonnage.recording.records import MarkKind
from tonnage.recording.timeline import spans
from tonnage.report.html.markup import clean

STRETCHES = 8_000
WHOLE_UP_TO_TIMES = 4
MOST_SPANS = 20_000
# From the bottom of the stack up: long-lived categories, then transient ones.
STACKING = (
    Category.EARLIER,
    Category.PARAMETERS,
    Category.OPTIMIZER_STATES,
    Category.GRADIENTS,
    Category.KV_CACHE,
    Category.INPUTS,
    Category.ACTIVATIONS,
    Category.WORKSPACE,
    Category.OTHER,
    Category.CONTEXT,
    Category.FRAGMENTATION,
)


def series_of(recording: Recording, stretches: int = STRETCHES) -> dict[str, Any]:
    """Return what the page draws: levels by category and reserved bytes at the points kept, phases and steps."""
    timeline = recording.timeline
    length = len(timeline.allocated_bytes)
    by_category: dict[Category, list[Allocation]] = {}
    for a in recording.allocations:
        by_category.setdefault(a.category, []).append(a)
    points = _points(recording, by_category, stretches)
    return {
        "events": length,
        "whole": len(points) == length,
        "points": differences(points),
        "reserved": differences([timeline.reserved_bytes[p] for p in points]),
        "categories": [
            {"key": str(c), "label": c.label, "levels": differences(_at(points, _levels(by_category[c], length)))}
            for c in STACKING
            if c in by_category
        ],
        "phases": _spans(recording, "phase", length),
        "steps": _spans(recording, "step", length),
        "peak": timeline.peak_sequence,
        "ceiling": max(recording.header.capacity_bytes - recording.header.overhead_bytes, 0),
    }


def differences(levels: Sequence[int]) -> list[int]:
    """Return the first level, then each level minus the one before."""
    return [*levels[:1], *(after - before for before, after in pairwise(levels))]


def _levels(allocations: Sequence[Allocation], length: int) -> list[int]:
    """Return the bytes after each event. Recomputed on demand: ten lists of a million are too many to keep."""
    changes = [0] * length
    for a in allocations:
        changes[a.born] += a.block_bytes
        if a.died is not None:
            changes[a.died] -= a.block_bytes
    return list(accumulate(changes))


def _at(points: Sequence[int], levels: Sequence[int]) -> list[int]:
    return [levels[p] for p in points]


def _points(recording: Recording, by_category: dict[Category, list[Allocation]], stretches: int) -> list[int]:
    timeline = recording.timeline
    length = len(timeline.allocated_bytes)
    if length <= WHOLE_UP_TO_TIMES * stretches:
        return list(range(length))
    edges = [number * length // stretches for number in range(stretches + 1)]
    kept = {0, length - 1, *(start for start in edges if start < length)}
    kept |= _extremes(timeline.allocated_bytes, edges, least=True)
    kept |= _extremes(timeline.reserved_bytes, edges)
    for allocations in by_category.values():
        kept |= _extremes(_levels(allocations, length), edges)
    return sorted(kept)


def _extremes(levels: Sequence[int], edges: Sequence[int], *, least: bool = False) -> set[int]:
    """Return where levels are highest (and lowest) in each stretch, the first of equals."""
    found = set()
    for start, end in pairwise(edges):
        stretch = levels[start:end]
        found.add(start + stretch.index(max(stretch)))
        if least:
            found.add(start + stretch.index(min(stretch)))
    return found


def _spans(recording: Recording, kind: MarkKind, length: int) -> list[tuple[int, int, str]]:
    """Return (first event, event after the last, name), only the longest if there are too many."""
    named = [(start, end, clean(name, 40)) for name, start, end in spans(recording.marks, kind, length) if name]
    if len(named) > MOST_SPANS:
        named = sorted(nlargest(MOST_SPANS, named, key=lambda span: span[1] - span[0]))
    return named

"""The timeline of a recording with a bounded number of points.

A run of few events keeps them all. A long one is cut into stretches, and of each the points stay at which allocated
bytes are least and most, reserved bytes are most, and each category is most: no maximum is lost, at any width.
Levels are written as differences, which are short. It does not know how they are drawn.
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
# From the bottom of the stack up: what stays long, then what comes and goes.
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
    """What the page draws: levels by category and reserved bytes at the points that are kept, phases and steps."""
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
    """The first level, then what each adds to the one before."""
    return [*levels[:1], *(after - before for before, after in pairwise(levels))]


def _levels(allocations: Sequence[Allocation], length: int) -> list[int]:
    """Bytes after each event. Made anew when asked for: ten lists of a million are too many to keep."""
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
    """Where the levels are most (and least) in each stretch, first of equals."""
    found = set()
    for start, end in pairwise(edges):
        stretch = levels[start:end]
        found.add(start + stretch.index(max(stretch)))
        if least:
            found.add(start + stretch.index(min(stretch)))
    return found


def _spans(recording: Recording, kind: MarkKind, length: int) -> list[tuple[int, int, str]]:
    """(first event, event after the last, name), the longest ones where there are too many."""
    named = [(start, end, clean(name, 40)) for name, start, end in spans(recording.marks, kind, length) if name]
    if len(named) > MOST_SPANS:
        named = sorted(nlargest(MOST_SPANS, named, key=lambda span: span[1] - span[0]))
    return named

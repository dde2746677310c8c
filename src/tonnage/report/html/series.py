"""The timeline of a recording with a bounded number of points.

A short run keeps all events. A long one is cut into stretches, keeping the points where allocated bytes are lowest and
highest, reserved bytes are highest, and each category is highest, so no maximum is lost at any width. Levels are stored
as differences, which are short. Ranks differ in events but share steps, so their lines are cut step by step. Blocks that
differ only in lifetime share a kind, and kinds that differ only in layer number or stack share a row of the page's table.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import accumulate, groupby, islice, pairwise
from typing import Any

from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording
from tonnage.recording.groups import module_pattern
from tonnage.recording.records import MarkKind
from tonnage.recording.timeline import spans
from tonnage.report.html.markup import clean, packed_json

STRETCHES = 8_000
WHOLE_UP_TO_TIMES = 4
MOST_SPANS = 20_000
# From the bottom of the stack up: long-lived categories, then transient ones.
STACKING = (
    *(Category.EARLIER, Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.GRADIENTS, Category.KV_CACHE),
    *(Category.INPUTS, Category.ACTIVATIONS, Category.WORKSPACE, Category.OTHER),
    *(Category.CONTEXT, Category.FRAGMENTATION),
)


def series_of(recording: Recording, stretches: int = STRETCHES) -> dict[str, Any]:
    """Return what the page draws: levels by category and reserved bytes at the points kept, phases and steps."""
    timeline = recording.timeline
    length = len(timeline.allocated_bytes)
    by_category: dict[Category, list[Allocation]] = defaultdict(list)
    for a in recording.allocations:
        by_category[a.category].append(a)
    # All events, or of each stretch where levels are lowest and highest.
    points: Sequence[int] = range(length)
    if length > WHOLE_UP_TO_TIMES * stretches:
        edges = [number * length // stretches for number in range(stretches + 1)]
        kept = {0, length - 1, *(start for start in edges if start < length)}
        kept |= _extremes(timeline.allocated_bytes, edges, least=True) | _extremes(timeline.reserved_bytes, edges)
        for allocations in by_category.values():
            kept |= _extremes(_levels(allocations, length), edges)
        points = sorted(kept)
    return {
        "events": length,
        "whole": len(points) == length,
        "points": differences(points),
        "reserved": differences([timeline.reserved_bytes[p] for p in points]),
        "categories": [
            {"key": str(c), "label": c.label, "levels": differences([levels[p] for p in points])}
            for c in STACKING
            if c in by_category and (levels := _levels(by_category[c], length))
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


MOST_STRETCHES = 300
Stretch = tuple[str, int, int]


def line_of(recording: Recording, samples: int) -> dict[str, object]:
    """Return a rank's stretches: name, events, and the highest allocated and reserved bytes of each piece."""
    timeline = recording.timeline
    found = list(_stretches(recording))
    each = max(1, samples // max(1, len(found)))
    return {
        "stretches": [
            {
                "name": name,
                "events": end - start,
                "allocated": differences(_highest(timeline.allocated_bytes, start, end, each)),
                "reserved": differences(_highest(timeline.reserved_bytes, start, end, each)),
            }
            for name, start, end in found
        ]
    }


def _stretches(recording: Recording) -> Iterator[Stretch]:
    """Yield steps, merged if there are very many; repeated numbers (0 after an evaluation) get a suffix."""
    length = len(recording.timeline.allocated_bytes)
    steps = [(int(name or 0), start, end) for name, start, end in spans(recording.marks, "step", length)]
    together = -(-max((step for step, _, _ in steps), default=0) // MOST_STRETCHES) or 1
    times: Counter[int] = Counter()
    for bucket, alike in islice(groupby(steps, key=lambda step: -(-step[0] // together)), MOST_STRETCHES):
        joined = list(alike)
        start, end = joined[0][1], joined[-1][2]
        times[bucket] += 1
        name = f"step {bucket}" if together == 1 else f"steps {(bucket - 1) * together + 1}–{bucket * together}"
        again = f" ({times[bucket]})" if times[bucket] > 1 else ""
        yield (name if bucket else "setup") + again, start, end


def _highest(levels: Sequence[int], start: int, end: int, pieces: int) -> list[int]:
    count = min(pieces, end - start)
    edges = [start + number * (end - start) // count for number in range(count + 1)]
    return [max(levels[first:last]) for first, last in pairwise(edges)]


MOST_BLOCKS = 1_000_000
MOST_KINDS = 50_000
FRAMES = 64
Key = tuple[Any, ...]


class FirstSeen(dict[Any, int]):
    """Numbers keys in order of first access."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


def packed_blocks(recording: Recording, most: int = MOST_BLOCKS) -> str:
    """Return the columns and the changes of reserved bytes as compressed, base64-encoded JSON."""
    levels = recording.timeline.reserved_bytes
    changes = [event for event, level in enumerate(levels) if level != (levels[event - 1] if event else 0)]
    columns = blocks_of(recording.allocations, most) | {
        "held_at": differences(changes),
        "held": differences([levels[event] for event in changes]),
    }
    return packed_json(columns)


def blocks_of(allocations: Sequence[Allocation], most: int = MOST_BLOCKS) -> dict[str, object]:
    """Return blocks by allocation time (`life` 0: until the end), their kinds, and each kind's group, module and stack."""
    kept = nlargest(most, allocations, key=lambda a: a.block_bytes) if len(allocations) > most else allocations
    kept = sorted(kept, key=lambda a: a.born)
    words, stacks, groups, kinds = FirstSeen(), FirstSeen(), FirstSeen(), FirstSeen()
    kind_of = []
    for a in kept:
        made = (a.category, a.operator, a.module, a.line, a.stack)
        key: Key = (*made, a.dtype, a.shape, 0 if a.shape else a.block_bytes)
        if len(kinds) >= MOST_KINDS and key not in kinds:  # too many: keep only the category
            key = (a.category, "", "", "", (), "", None, 0)
        kind_of.append(kinds[key])
    rows = [(groups[_group(kind)], words[clean(kind[2])], stacks[kind[4][:FRAMES]]) for kind in kinds]
    return {
        "born": differences([a.born for a in kept]),
        "life": [0 if a.died is None else a.died - a.born for a in kept],
        "bytes": [a.block_bytes for a in kept],
        "spare": [a.block_bytes - a.requested_bytes for a in kept],
        "kind": kind_of,
        "kinds": rows,
        "groups": [[words[clean(text)] for text in group[:-1]] for group in groups],
        "stacks": [[words[clean(frame)] for frame in stack] for stack in stacks],
        "words": list(words),
        "left_out": len(allocations) - len(kept),
    }


def _group(kind: Key) -> Key:
    """Return what a row of the table shares: category, operator, modules, line, the line inside a library, tensor."""
    category, operator, module, line, stack, dtype, shape, size = kind
    inner = stack[0] if stack and stack[0] != line else ""
    tensor = dtype if shape is None else f"{dtype} {list(shape)}".strip()
    return str(category), operator.removeprefix("aten::"), module_pattern(module), line, inner, tensor, size

"""A rank's memory over its run, step by step, so that ranks with different events can be overlaid.

Ranks differ in events but share steps. A stretch is one step (several in a long run), and its line has the same length
for every rank. Each piece keeps its highest level, so no peak is lost.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from tonnage.recording import Recording
from tonnage.recording.timeline import spans
from tonnage.report.html.series import differences

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
    joined: list[list[int]] = []
    for step, start, end in steps:
        bucket = -(-step // together)
        if joined and joined[-1][0] == bucket:
            joined[-1][2] = end
        else:
            joined.append([bucket, start, end])
    times: Counter[int] = Counter()
    for bucket, start, end in joined[:MOST_STRETCHES]:
        times[bucket] += 1
        name = f"step {bucket}" if together == 1 else f"steps {(bucket - 1) * together + 1}–{bucket * together}"
        again = f" ({times[bucket]})" if times[bucket] > 1 else ""
        yield (name if bucket else "setup") + again, start, end


def _highest(levels: Sequence[int], start: int, end: int, pieces: int) -> list[int]:
    count = min(pieces, end - start)
    edges = [start + number * (end - start) // count for number in range(count + 1)]
    return [max(levels[edges[number] : edges[number + 1]]) for number in range(count)]

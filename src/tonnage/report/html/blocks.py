"""All blocks of a run in a few columns, so that the page can show what was alive at any moment.

Blocks that differ only in lifetime share a kind, and kinds that differ only in layer number or stack share a group: a
row of the page's table. What is too much for a page is left out, smallest first, and counted.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from tonnage.recording import Allocation, Recording
from tonnage.recording.groups import module_pattern
from tonnage.report.html.markup import clean
from tonnage.report.html.series import differences
from tonnage.report.html.shell import packed_json

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
        key: Key = (
            a.category,
            a.operator,
            a.module,
            a.line,
            a.stack,
            a.dtype,
            a.shape,
            0 if a.shape else a.block_bytes,
        )
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

"""What a rule found in a recording: a sentence, its bytes, the responsible lines, and fixes.

A finding that names a cause may be why a run failed; otherwise it is evidence.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from tonnage.explain.case import Case
from tonnage.explain.fixes import Fix, fix_of
from tonnage.explain.rewriting import Rewrite
from tonnage.recording import Allocation, telling_lines
from tonnage.units import format_bytes

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

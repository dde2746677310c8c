"""Helpers to rewrite a run's allocations: sizes and lifetimes change, the order of events does not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tonnage.recording import Allocation, Recording
from tonnage.recording.timeline import spans


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A described change, and the allocations after it."""

    change: str
    costs: str
    how: str
    allocations: list[Allocation]


def resized(recording: Recording, share_of: Callable[[Allocation], float]) -> list[Allocation]:
    """Return the allocations, each at its share of its size."""
    return [scaled(a, share) if (share := share_of(a)) != 1.0 else a for a in recording.allocations]


def scaled(a: Allocation, share: float) -> Allocation:
    """Return a block at a share of its size, rounded as the allocator rounds."""
    size = max(1, int(a.requested_bytes * share))
    return replace(a, block_bytes=rounded(a.block_bytes * share), requested_bytes=size)


def rounded(size_bytes: float) -> int:
    """Round up to the allocator's smallest unit."""
    return max(512, -(-int(size_bytes) // 512) * 512)


def outside(
    a: Allocation, gaps: Sequence[tuple[int, int]], made_again: Callable[[int], int | None] = lambda number: None
) -> Iterator[Allocation]:
    """Yield a block's lifetimes outside these gaps; `made_again` may tell when after a gap it is there again."""
    born = a.born
    for number, (start, end) in enumerate(gaps):
        if born >= start or (a.died is not None and a.died <= start):
            continue
        yield replace(a, born=born, died=start)
        again = made_again(number)
        born = end if again is None else again
        if a.died is not None and a.died <= max(born, end):
            return
    yield a if born == a.born else replace(a, born=born)


def spans_of(recording: Recording, phase: str) -> Iterator[tuple[int, int]]:
    """Yield (first event, event after the last) of each occurrence of a phase."""
    turns = spans(recording.marks, "phase", len(recording.timeline.allocated_bytes))
    return ((start, end) for name, start, end in turns if name == phase)

"""The state of an allocator in mid-run: the segments it already held, and the blocks in use.

Free neighbours are always merged, so the blocks in use determine the free ones between them. A block that overlaps
another or is in no segment is left out. The caller counts the blocks in use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tonnage.allocator.blocks import ADDRESS_BITS, ALLOCATED, FREE, PENDING, UNMAPPED, Block, BlockPool
from tonnage.allocator.segments import ExpandableSegment
from tonnage.allocator.settings import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings

_RANGE_BYTES = 2**44


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the device allocated in one piece."""

    address: int
    size_bytes: int
    stream: int
    is_expandable: bool

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size_bytes


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block in use; a pending one was freed but is still used by a stream."""

    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    is_pending: bool = False


@dataclass(slots=True)
class State:
    """What an allocator holds at one moment: non-overlapping segments, and blocks, both by address."""

    segments: list[Segment] = field(default_factory=list)
    blocks: Sequence[LiveBlock] = field(default_factory=list)

    def chains(self, small: BlockPool, large: BlockPool, settings: AllocatorSettings) -> Iterator[list[Block]]:
        """Yield the linked blocks of each segment: in use, free, and unmapped between the ranges of an expandable one."""
        starts = [block.address for block in self.blocks]
        inside = {
            s.address: list(self.blocks[bisect_left(starts, s.address) : bisect_left(starts, s.end)])
            for s in self.segments
        }
        growing: dict[tuple[int, bool], list[Segment]] = {}
        for segment in self.segments:
            if segment.end > 1 << ADDRESS_BITS:
                continue  # not a GPU address
            # Whether it belongs to the small pool shows in its blocks, else in its size.
            blocks = inside[segment.address]
            if blocks:
                is_small = blocks[0].size_bytes <= SMALL_BYTES
            elif segment.is_expandable:
                is_small = segment.size_bytes % settings.large_segment_bytes != 0
            else:
                is_small = segment.size_bytes <= SMALL_SEGMENT_BYTES
            if segment.is_expandable:
                growing.setdefault((segment.stream, is_small), []).append(segment)
            else:
                yield _linked(_tiles(segment, blocks, small if is_small else large, None))
        for (_, is_small), members in growing.items():
            pool, page = (small, SMALL_SEGMENT_BYTES) if is_small else (large, settings.large_segment_bytes)
            # Addresses are reserved generously, up to the next segment.
            last = members[-1]
            others = [s.address for s in self.segments if s.address >= last.end and s not in members]
            end = min([*others, last.end + _RANGE_BYTES, 1 << ADDRESS_BITS])
            yield _linked(_range_tiles(members, inside, pool, page, end))


def _tiles(
    segment: Segment, blocks: list[LiveBlock], pool: BlockPool, owner: ExpandableSegment | None
) -> Iterator[Block]:
    at = segment.address
    for live in blocks:
        if live.address < at or live.size_bytes <= 0 or live.address + live.size_bytes > segment.end:
            continue
        if live.address > at:
            yield Block(at, live.address - at, segment.stream, pool, owner, FREE)
        state = PENDING if live.is_pending else ALLOCATED
        block = Block(live.address, live.size_bytes, segment.stream, pool, owner, state)
        block.requested_bytes = live.requested_bytes
        yield block
        at = live.address + live.size_bytes
    if at < segment.end:
        yield Block(at, segment.end - at, segment.stream, pool, owner, FREE)


def _range_tiles(
    members: list[Segment], inside: dict[int, list[LiveBlock]], pool: BlockPool, page_bytes: int, end: int
) -> Iterator[Block]:
    """Yield one range of addresses, partly mapped; its tail is not mapped yet."""
    base, stream = members[0].address, members[0].stream
    owner = ExpandableSegment(base, end - base, page_bytes)
    at = base
    for segment in members:
        if segment.address > at:
            yield Block(at, segment.address - at, stream, pool, owner, UNMAPPED)
        yield from _tiles(segment, inside[segment.address], pool, owner)
        at = segment.end
    if end > at:
        yield Block(at, end - at, stream, pool, owner, UNMAPPED)


def _linked(tiles: Iterator[Block]) -> list[Block]:
    chain = list(tiles)
    for block, following in pairwise(chain):
        block.next, following.previous = following, block
    return chain

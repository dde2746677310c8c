"""Segments: the memory that the allocator has from the device, and its only interface to it.

A fixed segment is one cudaMalloc; an expandable one is a range of addresses into which pages are mapped as it grows.
The allocator decides when to ask, and what to do when the device is full.

The order of addresses decides which of two equally large free blocks is taken, so segments are placed as NVIDIA's
driver on Linux was observed to place them: in ranges of a multiple of 32 MiB, from the top of the address space
down; the rest of a range serves later and smaller requests, newest range first. Other mappings of the process are
unknown here; a replay takes its addresses from the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.allocator.blocks import ALLOCATED, FREE, UNMAPPED, Block, BlockPool
from tonnage.allocator.settings import SIZE_MAX, SMALL_SEGMENT_BYTES, AllocatorSettings
from tonnage.allocator.stats import AllocatorCounters
from tonnage.units import MIB

# Measured on a full H200 (driver 580): this much of what cudaMemGetInfo reports as free cannot be allocated.
DRIVER_RESERVE_BYTES = 2 * MIB

# The reserve limit once the real one is lifted: sixty times the largest card.
UNLIMITED_BYTES = 2**44

Observer = Callable[[str, int, int, int], None]
Placement = Callable[[int], int]
RANGE_BYTES = 32 * 2**20
TOP = 0x7F80_0000_0000


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """A range of addresses, mapped page by page."""

    address: int
    size: int
    page_bytes: int

    def outward(self, start: int, stop: int) -> tuple[int, int]:
        """Return the pages that cover a range."""
        base, page = self.address, self.page_bytes
        return base + (start - base) // page * page, base - (base - stop) // page * page

    def inward(self, start: int, stop: int) -> tuple[int, int]:
        """Return the pages completely within a range."""
        base, page = self.address, self.page_bytes
        return base - (base - start) // page * page, base + (stop - base) // page * page


class AddressSpace:
    """Allocates and frees address ranges; a range is its bounds and the holes in it, by address."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._gaps: list[tuple[int, int]] = []
        self._bottom = TOP

    def take(self, size_bytes: int) -> int:
        """Return the start of a free range."""
        for _, _, holes in reversed(self._ranges):
            for index, (start, stop) in enumerate(holes):
                if stop - start >= size_bytes:
                    holes[index : index + 1] = [(start + size_bytes, stop)] if stop - start > size_bytes else []
                    return start
        length = -(-size_bytes // RANGE_BYTES) * RANGE_BYTES
        for index, (bottom, top) in reversed([*enumerate(self._gaps)]):
            if top - bottom >= length:
                self._gaps[index : index + 1] = [(bottom, top - length)] if top - bottom > length else []
                start = top - length
                break
        else:
            self._bottom = start = self._bottom - length
        left = [(start + size_bytes, start + length)] if length > size_bytes else []
        self._ranges.append((start, start + length, left))
        return start

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a range; an empty one is dropped."""
        index = next(i for i, (start, stop, _) in enumerate(self._ranges) if start <= address < stop)
        start, stop, holes = self._ranges[index]
        holes[:] = _merged([*holes, (address, address + size_bytes)])
        if holes == [(start, stop)]:
            del self._ranges[index]
            self._gaps = _merged([*self._gaps, (start, stop)])


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


class Segments:
    """What is reserved on one device, with the counters of the pools."""

    def __init__(
        self,
        capacity_bytes: int,
        outside_bytes: int,
        settings: AllocatorSettings,
        observer: Observer | None,
        placement: Placement | None,
    ) -> None:
        self.capacity_bytes, self.outside_bytes, self.settings = capacity_bytes, outside_bytes, settings
        self.is_unlimited = False
        self.counters = AllocatorCounters()
        self._addresses = AddressSpace()
        self._place = placement or self._addresses.take
        self._forget = self._addresses.give_back if placement is None else _nothing
        self.notify = observer or _nothing

    @property
    def free_bytes(self) -> int:
        """Free bytes, as cudaMemGetInfo reports them."""
        return self.capacity_bytes - self.outside_bytes - self.counters.reserved_bytes

    def _fits(self, size: int) -> bool:
        if self.is_unlimited:
            return self.counters.reserved_bytes + size <= UNLIMITED_BYTES
        return size <= self.free_bytes - DRIVER_RESERVE_BYTES

    def allocate(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Return a new fixed segment as one block, or None if the device is full."""
        if not self._fits(size):
            return None
        block = Block(self._place(size), size, stream, pool, None, ALLOCATED)
        if pool.owner is not None:
            pool.owner.segments += 1
        pool.counters.reserve(size, 1)
        self.counters.device_allocs += 1
        if size >= self.settings.max_split_bytes:
            self.counters.oversize_segments.add(1)
        self.notify("segment_alloc", block.address, size, stream)
        return block

    def release(self, block: Block) -> None:
        """Return a completely free fixed segment to the device."""
        pool = block.pool
        pool.remove(block)
        if pool.owner is not None:
            pool.owner.segments -= 1
        pool.counters.unreserve(block.size, 1)
        self.counters.device_frees += 1
        if block.size >= self.settings.max_split_bytes:
            self.counters.oversize_segments.add(-1)
        self._forget(block.address, block.size)
        self.notify("segment_free", block.address, block.size, block.stream)

    def release_pool(self, pool: BlockPool) -> None:
        """Release every free fixed segment, and every free page of the expandable ones."""
        free = pool.all_free()
        for block in free:
            if block.segment is None and not block.is_split:
                self.release(block)
        for block in free:
            if block.segment is not None:
                self.unmap(block)

    def collect_garbage(self, pool: BlockPool, excess_bytes: int) -> None:
        """Release free segments of at least average age, round by round, until the excess is gone."""
        ages = {block: pool.searches - block.gc_base for block in pool.all_free() if not block.is_split}
        progressed = True
        while excess_bytes > 0 and progressed and ages:
            average = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= average and block.segment is None]
            progressed = bool(old)
            for block in old:
                excess_bytes -= block.size
                del ages[block]
                self.release(block)

    def release_oversize(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Release a block above `max_split_size_mb` (which smaller requests never use), or several, largest first."""
        limit, free = self.settings.max_split_bytes, pool.free.get(stream)
        if limit == SIZE_MAX or free is None:
            return False
        wanted = max(size, limit)
        index = free.first_of(wanted)
        if index < len(free.blocks) and free.blocks[index].segment is None:
            self.release(free.blocks[index])
            return True
        released = 0
        for block in free.blocks[:index][::-1]:
            if released >= wanted or block.size < limit:
                break
            if block.segment is None:
                released += block.size
                self.release(block)
        return released >= wanted

    def grow(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Return a block of at least this size, by mapping pages at the lowest address with room."""
        block = self._growable(pool, size, stream)
        if block is None:
            page = SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes
            # An eighth more than the device has, so that pages can move to the end of a segment.
            length = max(self.capacity_bytes + self.capacity_bytes // 8, size if self.is_unlimited else 0)
            length = -(-length // page) * page
            segment = ExpandableSegment(self._place(length), length, page)
            block = Block(segment.address, length, stream, pool, segment, UNMAPPED)
            pool.add_unmapped(block)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        if pool.owner is not None:
            pool.owner.segments += 1
        return block

    def unmap(self, block: Block) -> None:
        """Release the pages completely within a free block of an expandable segment."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        start, stop = segment.inward(block.address, block.address + block.size)
        if start >= stop:
            return
        pool.remove(block)
        for address, end, before in ((block.address, start, True), (stop, block.address + block.size, False)):
            if end > address:
                rest = Block(address, end - address, block.stream, pool, segment, FREE)
                rest.insert_between(*((block.previous, block) if before else (block, block.next)))
                pool.add(rest)
        block.address, block.size = start, stop - start
        self._merge(block, UNMAPPED, pool.remove_unmapped)
        pool.add_unmapped(block)
        if pool.owner is not None:
            pool.owner.segments -= 1
        pool.counters.unreserve(stop - start, 0)
        self.counters.device_frees += 1
        self.notify("segment_unmap", start, stop - start, block.stream)
        if not block.is_split:
            pool.remove_unmapped(block)
            self._forget(segment.address, segment.size)

    def _growable(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        for unmapped in pool.unmapped.get(stream, ()):
            previous = unmapped.previous
            start = previous if previous is not None and previous.state == FREE else unmapped
            room = 0
            block: Block | None = start
            while block is not None and room < size and block.state in (FREE, UNMAPPED):
                room += block.size
                block = block.next
            if room >= size:
                return start
        return None

    def _map(self, block: Block, size: int) -> bool:
        segment, pool = block.segment, block.pool
        assert segment is not None
        start, stop = segment.outward(block.address, block.address + size)
        if not self._fits(stop - start):
            return False
        pool.remove_unmapped(block)
        if stop - start < block.size:
            rest = Block(stop, block.size - (stop - start), block.stream, pool, segment, UNMAPPED)
            rest.insert_between(block, block.next)
            pool.add_unmapped(rest)
            block.size = stop - start
        self._merge(block, FREE, pool.remove)
        pool.add(block)
        pool.counters.reserve(stop - start, 0)
        self.counters.device_allocs += 1
        self.notify("segment_map", start, stop - start, block.stream)
        return True

    def _merge(self, block: Block, state: int, remove: Callable[[Block], None]) -> None:
        if block.previous is not None and block.previous.state == state:
            remove(block.previous)
            block.absorb_previous(block.previous)
        if block.next is not None and block.next.state == state:
            remove(block.next)
            block.absorb_next(block.next)


def _nothing(*_: object) -> None:
    pass

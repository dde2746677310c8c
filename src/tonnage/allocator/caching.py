"""PyTorch's CUDA caching allocator, exact to the byte.

It returns blocks of cached segments, asks the device for more if none fits, and releases segments if the device is
full. It does not know what is in the blocks, or when a stream is done with them: callers say so with
`process_events`.

Not modelled: `MemPool(use_on_oom=True)`, `MemPool(no_split=True)`, pools with their own allocator, and sharing
between processes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from tonnage.allocator.adopt import State
from tonnage.allocator.blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    FREE,
    PENDING,
    UNMAPPED,
    Block,
    BlockPool,
    PoolId,
    PrivatePool,
    StreamUses,
    describe_segments,
)
from tonnage.allocator.oom import OutOfMemory, Shortage
from tonnage.allocator.segments import Observer, Placement, Segments
from tonnage.allocator.settings import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorSettings, BadAllocatorSettings

DEFAULT_SETTINGS = AllocatorSettings()


class CachingAllocator:
    """The allocator of one device.

    | call                                  | stands for                                                   |
    |---------------------------------------|--------------------------------------------------------------|
    | `malloc(size, stream)`, `free(block)` | a tensor's storage is allocated, freed                       |
    | `record_stream(address, stream)`      | `Tensor.record_stream`: a later `free` waits for that stream |
    | `process_events(stream)`              | that stream (None: every stream) has caught up               |
    | `empty_cache()`                       | `torch.cuda.empty_cache`                                     |
    | `set_memory_fraction(f)`              | `torch.cuda.set_per_process_memory_fraction`                 |
    | `begin_allocate_to_pool(id)`, ...     | a CUDA graph's capture, `torch.cuda.use_mem_pool`            |
    | `memory_stats()`, `snapshot()`        | their namesakes in `torch.cuda`                              |

    `capacity_bytes` is what the program sees as the device's total. `outside_bytes` may be set at any time: memory of
    the process beyond this allocator (context, libraries). `observer(action, address, size, stream)` is called for
    "segment_alloc", "segment_free", "segment_map", "segment_unmap" and "oom". `placement(size)` chooses addresses.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        outside_bytes: int = 0,
        observer: Observer | None = None,
        *,
        placement: Placement | None = None,
        device: int = 0,
    ) -> None:
        self.device = device
        self._segments = Segments(capacity_bytes, outside_bytes, settings, observer, placement)
        self.counters = self._segments.counters
        self._small = BlockPool(self.counters.small, is_small=True)
        self._large = BlockPool(self.counters.large, is_small=False)
        self._active: dict[int, Block] = {}
        self._streams = StreamUses(self.complete_free)
        self._stream_uses = self._streams.uses
        self._pools: dict[PoolId, PrivatePool] = {}
        self._captures: list[tuple[PoolId, Callable[[int], bool]]] = []
        self._max_split_at_start = settings.max_split_bytes
        self.allowed_bytes: int | None = None
        self.settings = settings
        self.set_memory_fraction(settings.memory_fraction)

    # Settings and limits

    @property
    def settings(self) -> AllocatorSettings:
        """The configuration; setting it is `torch.cuda.memory._set_allocator_settings`."""
        return self._settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self._settings = self._segments.settings = settings
        self._divides = settings.rounds_to_divisions
        self._max_split = settings.max_split_bytes
        self._update_modes()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved bytes to a fraction of the capacity; 1 lifts the limit."""
        if not 0 <= fraction <= 1:
            raise BadAllocatorSettings(f"invalid fraction:{fraction:g}. Please set within [0, 1].", RuntimeError)
        self.allowed_bytes = int(fraction * self.capacity_bytes) if fraction < 1 else None
        self._update_modes()

    def lift_limit(self) -> None:
        """Let the device satisfy any reasonable request from now on; the reported capacity stays the same."""
        self._segments.is_unlimited = True
        self._update_modes()

    def _update_modes(self) -> None:
        for pool in self._block_pools():
            pool.set_expandable(self._settings.expandable_segments)
        is_limited = self.allowed_bytes is not None and not self._segments.is_unlimited
        self._collects = is_limited and self._settings.garbage_collection_threshold > 0

    @property
    def capacity_bytes(self) -> int:
        """The device's total as the program sees it."""
        return self._segments.capacity_bytes

    @property
    def outside_bytes(self) -> int:
        """Memory of the process outside this allocator."""
        return self._segments.outside_bytes

    @outside_bytes.setter
    def outside_bytes(self, value: int) -> None:
        self._segments.outside_bytes = value

    @property
    def free_bytes(self) -> int:
        """Free bytes, as cudaMemGetInfo reports them."""
        return max(self._segments.free_bytes, 0)

    # Allocation: `malloc` and `free` run for every tensor, and are inlined for speed.

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Return a block for a request; raises `OutOfMemory`."""
        rounded = self._settings.rounded_bytes(size) if self._divides else (size + 511) & -512 or 512
        pool = self._small if rounded <= SMALL_BYTES else self._large
        if self._captures:
            # The innermost capture that accepts this stream.
            owners = (self._pools[pool_id] for pool_id, accepts in reversed(self._captures) if accepts(stream))
            if (owner := next(owners, None)) is not None:
                pool = owner.small if pool.is_small else owner.large
        block = self._cached(pool, rounded, stream) or self._acquire(pool, rounded, stream, size)
        counters, least = pool.counters, pool.min_remainder
        segment, previous = block.segment, block.previous
        was_split = previous is not None or block.next is not None
        left = block.size - rounded
        if left >= least and (rounded < self._max_split or least == MIN_BLOCK_BYTES):
            rest = block
            block = Block(rest.address, rounded, stream, pool, segment, ALLOCATED)
            block.previous, block.next = previous, rest
            if previous is not None:
                previous.next = block
            rest.previous = block
            rest.address += rounded
            rest.size = left
            pool.add(rest)
            if segment is None:
                if was_split:
                    counters.split(0, -rounded)
                else:
                    counters.split(1, left)
        elif was_split and segment is None:
            counters.split(-1, -block.size)
        block.state = ALLOCATED
        block.requested_bytes = size
        self._active[block.address] = block
        counters.allocate(block.size, size)
        if block.size >= self._max_split:
            self.counters.oversize_allocations.add(1)
        return block

    def free(self, block: Block) -> None:
        """Free a block. It can be reused now, or once the streams that it was recorded on catch up."""
        if self._stream_uses and block in self._stream_uses:
            self.request_free(block)
            self._streams.wait(block, capturing=bool(self._captures))
            return
        assert block.state == ALLOCATED, f"{block} is not allocated"
        size, counters = block.size, block.pool.counters
        counters.allocation -= 1
        counters.allocated_bytes -= size
        if size >= self._max_split:
            self.counters.oversize_allocations.add(-1)
        self._recycle(block)

    def request_free(self, block: Block) -> None:
        """Do the first half of a deferred `free`: the block no longer counts as allocated."""
        assert block.state == ALLOCATED, f"{block} is not allocated"
        block.state = PENDING
        counters = block.pool.counters
        counters.allocation -= 1
        counters.allocated_bytes -= block.size
        counters.pending += 1
        counters.pending_bytes += block.size
        if block.size >= self._max_split:
            self.counters.oversize_allocations.add(-1)

    def complete_free(self, block: Block) -> None:
        """Do the second half of a deferred `free`: the block joins the cache."""
        assert block.state == PENDING, f"{block} is not waiting to be free"
        counters = block.pool.counters
        counters.pending -= 1
        counters.pending_bytes -= block.size
        self._recycle(block)

    def _recycle(self, block: Block) -> None:
        pool = block.pool
        counters = pool.counters
        # Two blocks share an address only in the replay of a contradictory trace.
        self._active.pop(block.address, None)
        counters.requested_bytes -= block.requested_bytes
        blocks = change = 0
        neighbour = block.previous
        if neighbour is not None and neighbour.state == FREE:
            blocks, change = -1, -neighbour.size
            pool.remove(neighbour)
            block.absorb_previous(neighbour)
        neighbour = block.next
        if neighbour is not None and neighbour.state == FREE:
            blocks -= 1
            change -= neighbour.size
            pool.remove(neighbour)
            block.absorb_next(neighbour)
        pool.add(block)
        if block.segment is None:
            if block.previous is not None or block.next is not None:
                counters.split(blocks + 1, change + block.size)
            elif blocks:
                counters.split(blocks, change)

    def _cached(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        if self._collects:
            pool.searches += 1
        free = pool.free.get(stream)
        if free is None:
            return None
        blocks = free.blocks
        index = bisect_left(free.keys, size << ADDRESS_BITS)
        if index == len(blocks):
            return None
        block = blocks[index]
        if block.segment is not None:
            if self._settings.expandable_segments:
                index = _best_expandable(blocks, index)
            else:  # switched off after some were made: only the others are used
                while index < len(blocks) and blocks[index].segment is not None:
                    index += 1
            if index == len(blocks):
                return None
            block = blocks[index]
        limit = self._max_split
        if block.size >= limit and (size < limit or block.size - size >= self._settings.max_non_split_rounding_bytes):
            return None
        del free.keys[index], blocks[index]
        return block

    def adopt(self, state: State) -> dict[int, Block]:
        """Start in mid-run with existing segments and blocks; return the blocks in use, by address."""
        for chain in state.chains(self._small, self._large, self._settings):
            pool = chain[0].pool
            mapped = sum(block.size for block in chain if block.state != UNMAPPED)
            pool.counters.reserve(mapped, segments=0 if chain[0].segment else 1)
            for block in chain:
                if block.state == FREE:
                    pool.add(block)
                    if block.segment is None and block.is_split:
                        pool.counters.split(1, block.size)
                elif block.state == UNMAPPED:
                    pool.add_unmapped(block)
                else:
                    was_pending, block.state = block.state == PENDING, ALLOCATED
                    self._active[block.address] = block
                    pool.counters.allocate(block.size, block.requested_bytes)
                    if block.size >= self._max_split:
                        self.counters.oversize_allocations.add(1)
                    if was_pending:
                        self.request_free(block)
        return dict(self._active)

    def block_at(self, address: int) -> Block:
        """Return the block in use (or pending) that starts at an address."""
        return self._active[address]

    # Cache misses

    def _acquire(self, pool: BlockPool, size: int, stream: int, requested: int) -> Block:
        if self._collects and self.allowed_bytes is not None:
            threshold = int(self._settings.garbage_collection_threshold * self.allowed_bytes)
            self._segments.collect_garbage(self._large, self.counters.reserved_bytes - threshold)
        segment_bytes = self._settings.segment_bytes(size)
        block = self._from_device(pool, size, segment_bytes, stream)
        if block is None and self._segments.release_oversize(pool, size, stream):
            block = self._from_device(pool, size, segment_bytes, stream)
        if block is None and not self._captures:
            self.empty_cache()
            self.counters.alloc_retries += 1
            block = self._from_device(pool, size, segment_bytes, stream)
        if block is None:
            self.counters.ooms += 1
            self._segments.notify("oom", self.free_bytes, size, stream)
            private = [half for pool in self._pools.values() for half in pool.halves]
            shortage = Shortage(
                device=self.device,
                requested_bytes=requested,
                segment_bytes=segment_bytes,
                capacity_bytes=self.capacity_bytes,
                free_bytes=self.free_bytes,
                allowed_bytes=self.allowed_bytes,
                process_bytes=self.counters.reserved_bytes + self.outside_bytes,
                allocated_bytes=self.counters.allocated_bytes,
                reserved_bytes=self.counters.reserved_bytes,
                private_pool_bytes=sum(block.size for half in private for block in half.all_free()),
            )
            raise OutOfMemory(shortage)
        return block

    def _from_device(self, pool: BlockPool, size: int, segment_bytes: int, stream: int) -> Block | None:
        is_limited = self.allowed_bytes is not None and not self._segments.is_unlimited
        if is_limited and self.counters.reserved_bytes + segment_bytes > (self.allowed_bytes or 0):
            return None
        if self._settings.expandable_segments:
            return self._segments.grow(pool, size, stream)
        return self._segments.allocate(pool, segment_bytes, stream)

    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Release free memory: of every pool, or of one private pool without users."""
        if pool_id is None and not self._captures:
            self.counters.syncs += 1
            self.process_events()
            self._segments.release_pool(self._large)
            self._segments.release_pool(self._small)
        for private in [pool for pool in self._pools.values() if not pool.uses and pool_id in (None, pool.id)]:
            if pool_id is not None:
                self.counters.syncs += 1
                self._streams.end_deferral()
                self._streams.catch_up(owner=private)
            for half in private.halves:
                self._segments.release_pool(half)
            if private.segments == 0:
                del self._pools[private.id]

    def release_segment(self, address: int) -> bool:
        """Release the free segment, or the pages within the free block, at an address, as a trace records."""
        for pool in self._block_pools():
            for block in pool.all_free():
                if block.address <= address < block.address + block.size:
                    if block.segment is None and block.is_split:
                        return False
                    (self._segments.release if block.segment is None else self._segments.unmap)(block)
                    return True
        return False

    # Streams

    def record_stream(self, address: int, stream: int) -> None:
        """Record that the block at an address is used on a stream other than its own."""
        self._streams.record(self._active[address], stream, capturing=bool(self._captures))

    def process_events(self, stream: int | None = None) -> None:
        """Complete what was queued on a stream (None: on every stream) when blocks were freed."""
        if not self._captures:
            self._streams.end_deferral()
            self._streams.catch_up(stream)

    def retire_stream(self, stream: int) -> None:
        """End all uses by a stream that other blocks were recorded on."""
        self._streams.retire(stream)

    # Private pools

    def create_pool(self, pool_id: PoolId) -> None:
        """Create a private pool, or add one user."""
        if pool_id in self._pools:
            self._pools[pool_id].uses += 1
        else:
            self._pools[pool_id] = PrivatePool(pool_id, self.counters.small, self.counters.large)
            self._update_modes()

    def begin_allocate_to_pool(self, pool_id: PoolId, accepts: Callable[[int], bool] = lambda stream: True) -> None:
        """Send requests on accepted streams to a private pool from now on."""
        assert all(pool_id != other for other, _ in self._captures), f"already allocating to {pool_id}"
        self.create_pool(pool_id)
        self._captures.append((pool_id, accepts))

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop sending requests to the pool."""
        self._captures = [capture for capture in self._captures if capture[0] != pool_id]

    def release_pool(self, pool_id: PoolId) -> None:
        """Remove one user; without any, `empty_cache` may release the pool's segments."""
        self._pools[pool_id].uses -= 1

    def pool_use_count(self, pool_id: PoolId) -> int:
        """Return the number of users of a private pool."""
        return self._pools[pool_id].uses

    def _block_pools(self) -> list[BlockPool]:
        return [self._small, self._large, *(half for pool in self._pools.values() for half in pool.halves)]

    # Reports

    def memory_stats(self) -> dict[str, int]:
        """Return the flat dictionary of `torch.cuda.memory_stats()`."""
        limit = self._max_split_at_start
        return dict(sorted((self.counters.flat() | {"max_split_size": limit if limit < 2**63 else -1}).items()))

    def reset_peak(self) -> None:
        """Reset peaks, like `torch.cuda.reset_peak_memory_stats`."""
        self.counters.reset_peak()

    def reset_accumulated(self) -> None:
        """Reset totals, like `torch.cuda.reset_accumulated_memory_stats`."""
        self.counters.reset_accumulated()

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the `segments` of `torch.cuda.memory._snapshot()`."""
        free = [block for pool in self._block_pools() for block in pool.all_free()]
        return describe_segments([*free, *self._active.values()], self.device)


def _best_expandable(blocks: list[Block], index: int) -> int:
    """Return the best fit, counting the tail of an expandable segment at the size it could grow to."""
    reach = _reach(blocks[index])
    while index + 1 < len(blocks) and blocks[index].segment is not None:
        following = _reach(blocks[index + 1])
        if following >= reach:
            break
        index, reach = index + 1, following
    return index


def _reach(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)

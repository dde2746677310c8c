"""Blocks, which tile a segment as a chain, the sorted sets of them that a pool keeps, and those that await a stream."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from tonnage.allocator.settings import MIN_BLOCK_BYTES, SMALL_BYTES
from tonnage.allocator.stats import CountedPool

if TYPE_CHECKING:
    from tonnage.allocator.segments import ExpandableSegment

PoolId = tuple[int, int]
ADDRESS_BITS = 48  # enough for a GPU's virtual addresses

# The states of a block. PENDING: freed by the program, still in use on another stream.
ALLOCATED, PENDING, FREE, UNMAPPED = range(4)


class Block:
    """A range of one segment: in use, pending, free, or unmapped address space."""

    gc_base: int  # these two are set while the block is free
    key: int
    __slots__ = tuple("address gc_base key next pool previous requested_bytes segment size state stream".split())

    def __init__(
        self, address: int, size: int, stream: int, pool: BlockPool, segment: ExpandableSegment | None, state: int
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.segment = segment
        self.state = state
        self.requested_bytes = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.previous is not None or self.next is not None

    def insert_between(self, previous: Block | None, following: Block | None) -> None:
        """Insert it into the chain."""
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self

    def absorb_previous(self, gone: Block) -> None:
        """Merge with the left neighbour."""
        self.address = gone.address
        self.size += gone.size
        self.previous = previous = gone.previous
        if previous is not None:
            previous.next = self

    def absorb_next(self, gone: Block) -> None:
        """Merge with the right neighbour."""
        self.size += gone.size
        self.next = following = gone.next
        if following is not None:
            following.previous = self

    def __repr__(self) -> str:
        state = ("allocated", "pending", "free", "unmapped")[self.state]
        return f"<Block {self.address:#x} {self.size} B {state} on stream {self.stream}>"


class FreeBlocks:
    """The free blocks of one stream, by size and then by address."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        # Two parallel lists: integer keys compare quickly with the C bisect.
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def first_of(self, size: int) -> int:
        """Return the index of the smallest block of at least this size."""
        return bisect_left(self.keys, size << ADDRESS_BITS)


class BlockPool:
    """The free blocks of the small or the large pool, and the unmapped ranges of its expandable segments."""

    __slots__ = ("counters", "free", "is_small", "min_remainder", "owner", "searches", "unmapped")

    def __init__(self, counters: CountedPool, *, is_small: bool, owner: PrivatePool | None = None) -> None:
        self.is_small = is_small
        self.counters = counters
        self.owner = owner
        self.free: dict[int, FreeBlocks] = {}
        self.unmapped: dict[int, list[Block]] = {}
        self.searches = 0
        self.min_remainder = 0
        self.set_expandable(False)

    def set_expandable(self, expandable: bool) -> None:
        """Set the smallest remainder to split: expandable segments split anywhere, large blocks only above 1 MiB."""
        self.min_remainder = MIN_BLOCK_BYTES if self.is_small or expandable else SMALL_BYTES + 1

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.state = FREE
        block.gc_base = self.searches
        free = self.free.get(block.stream)
        if free is None:
            free = self.free[block.stream] = FreeBlocks()
        block.key = key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(free.keys, key)
        free.keys.insert(index, key)
        free.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        free = self.free[block.stream]
        index = bisect_left(free.keys, block.key)
        del free.keys[index], free.blocks[index]

    def add_unmapped(self, block: Block) -> None:
        """Add a range that has addresses but no memory."""
        block.state = UNMAPPED
        insort(self.unmapped.setdefault(block.stream, []), block, key=attrgetter("address"))

    def remove_unmapped(self, block: Block) -> None:
        """Remove an unmapped range."""
        self.unmapped[block.stream].remove(block)

    def all_free(self) -> list[Block]:
        """Return every free block, by stream, size and address."""
        return [block for stream in sorted(self.free) for block in self.free[stream].blocks]


class PrivatePool:
    """A private pool for a CUDA graph or a `torch.cuda.MemPool`."""

    __slots__ = ("id", "large", "segments", "small", "uses")

    def __init__(self, pool_id: PoolId, small: CountedPool, large: CountedPool) -> None:
        self.id = pool_id
        self.uses = 1
        self.segments = 0
        self.small = BlockPool(small, is_small=True, owner=self)
        self.large = BlockPool(large, is_small=False, owner=self)

    @property
    def halves(self) -> tuple[BlockPool, BlockPool]:
        return self.small, self.large


class StreamUses:
    """The streams that blocks were recorded on, and freed blocks that wait until callers say that those have caught up.

    While allocations go to a private pool (as in graph capture) no stream can be queried, and they wait until that is over.
    """

    def __init__(self, reuse: Callable[[Block], None]) -> None:
        self._reuse = reuse
        self.uses: dict[Block, set[int]] = {}
        self._capture_uses: dict[Block, set[int]] = {}
        self._waiting: dict[int, list[Block]] = {}
        self._open: dict[Block, int] = {}
        self._deferred: list[Block] = []

    def record(self, block: Block, stream: int, *, capturing: bool) -> None:
        """Record that a block is used on a stream."""
        if stream == block.stream:
            return
        self.uses.setdefault(block, set()).add(stream)
        if capturing:
            self._capture_uses.setdefault(block, set()).add(stream)

    def wait(self, block: Block, *, capturing: bool) -> None:
        """Make a freed block wait for its recorded streams."""
        if capturing:
            self._deferred.append(block)
        else:
            self._queue(block, self.uses.pop(block))

    def end_deferral(self) -> None:
        """End a capture: its own stream uses are over, the others are waited for."""
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            streams = self.uses.pop(block) - self._capture_uses.pop(block, set())
            self._queue(block, streams)
            if not streams:
                self._reuse(block)

    def catch_up(self, stream: int | None = None, owner: PrivatePool | None = None) -> None:
        """Complete all that was queued on a stream (None: on every stream), or only for a private pool's blocks."""
        for done in list(self._waiting) if stream is None else [stream]:
            blocks = self._waiting.pop(done, [])
            kept = [block for block in blocks if owner is not None and block.pool.owner is not owner]
            if kept:
                self._waiting[done] = kept
            for block in blocks:
                if block in kept:
                    continue
                self._open[block] -= 1
                if not self._open[block]:
                    del self._open[block]
                    self._reuse(block)

    def retire(self, stream: int) -> None:
        """Drop all uses by a stream that is finished."""
        self.catch_up(stream)
        for block in [block for block, streams in self.uses.items() if stream in streams]:
            self.uses[block].discard(stream)
            if not self.uses[block]:
                del self.uses[block]

    def _queue(self, block: Block, streams: set[int]) -> None:
        for stream in sorted(streams):
            self._waiting.setdefault(stream, []).append(block)
        if streams:
            self._open[block] = len(streams)


_STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


def describe_segments(blocks: Iterable[Block], device: int) -> list[dict[str, Any]]:
    """Describe segments as `torch.cuda.memory._snapshot()` does, by address; a run of mapped pages counts as one."""
    heads = (block for block in blocks if block.previous is None or block.previous.state == UNMAPPED)
    return sorted((_segment(head, device) for head in heads), key=lambda segment: segment["address"])


def _segment(head: Block, device: int) -> dict[str, Any]:
    blocks = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if block.state in _STATES]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.state == ALLOCATED),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": head.pool.owner.id if head.pool.owner else (0, 0),
        "is_expandable": head.segment is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_bytes,
                "state": _STATES.get(block.state, "inactive"),
                "frames": [],
            }
            for block in blocks
        ],
    }

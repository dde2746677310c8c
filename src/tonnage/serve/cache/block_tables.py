"""Block tables: which blocks a sequence gets, swaps to the host, publishes and returns.

Blocks are allocated all or none. A sequence starts with the cached part of its prompt, with its parent's blocks (`n`
> 1), or with its own from the host. Only full blocks whose step is complete are shared, and the one block that a
parent and its child would both write is copied at once: so no block with two holders is ever written. This module
does not know the schedule.
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass

from tonnage.serve.cache.block_pool import BlockPool, OutOfBlocks
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status

# Blocks, against thrashing: 256 sequences in a cache for a tenth of them see 82 preemptions instead of 215, and 1 %
# more steps.
ROOM_TO_GROW = 2
# Enum member lookup is slow in Python 3.11, and this one is read for all running sequences at each admission.
RUNNING = Status.RUNNING


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start. Tokens that a preempted sequence finds again count neither as queries nor as hits."""

    finished: int = 0  # sequences, for any reason
    preemptions: int = 0
    swaps: int = 0  # preemptions that swapped
    prefix_queries: int = 0  # prompt tokens
    prefix_hits: int = 0  # of these, tokens found


class BlockTables:
    """The pools on device and host, and the allocation of blocks to sequences."""

    def __init__(self, pool: BlockPool, host_blocks: int) -> None:
        self.pool = pool
        self.host_pool = BlockPool(host_blocks + 1, pool.size, prefix_cache=False)
        self.counters = CacheCounters()
        self._refused: tuple[Sequence, int] | None = None  # the last refused sequence, and the blocks it needed

    def refuse_still(self, sequence: Sequence, running: int) -> bool:
        """Return whether the pool's size alone is enough to refuse it again."""
        refused = self._refused
        return running > 0 and refused is not None and refused[0] is sequence and self._room(running) < refused[1]

    def give(self, sequence: Sequence, step: ScheduledStep, running: int) -> bool:
        """Allocate blocks for all of its tokens; return False if there are not enough."""
        if self.refuse_still(sequence, running):
            return False
        self._refused = None
        room = self._room(running)
        if sequence.status is Status.SWAPPED:
            return self._swap_in(sequence, step, room)
        parent = sequence.parent
        if parent is None or sequence.rank >= 0:
            return self._start(sequence, room)
        # Whether the parent's prompt is in its blocks, written by completed steps.
        is_there = parent.slot >= 0 and not parent.busy and parent.computed >= parent.prompt_length
        return self._fork(sequence, parent, step, room) if is_there else self._start(sequence, room)

    def grow(self, sequences: Listed[Sequence], step: ScheduledStep) -> None:
        """Make room for one more token of each, in a new block if needed; raises `OutOfBlocks` if not for all."""
        size = self.pool.size
        full = [one for one in sequences if one.next_block_at == len(one.blocks) * size]
        for one, block in zip(full, self.pool.take(len(full)), strict=True):
            step.grown.append((one, len(one.blocks)))
            one.blocks.append(block)
        for one in sequences:
            room, last = len(one.blocks) * size, one.end - 2
            one.next_block_at = room if room < last else last

    def publish(self, sequence: Sequence, complete: int = 0) -> None:
        """Offer its full blocks: of the first `complete` tokens and, with no chunk in flight, before the last known."""
        pool, tokens, published = self.pool, sequence.tokens, sequence.published
        if not pool.prefix_cache or sequence.status is not RUNNING:
            return
        if not sequence.busy:
            complete = max(complete, min(sequence.computed, len(tokens) - 1))
        size, prefix_id = pool.size, sequence.prefix_id
        for index, block in enumerate(sequence.blocks[published : complete // size], published):
            prefix_id = pool.publish(block, prefix_id, sequence.history, index * size)
        sequence.published, sequence.prefix_id = max(published, complete // size), prefix_id

    def release(self, sequence: Sequence) -> None:
        """Release everything it holds."""
        if self._refused and self._refused[0] is sequence:
            self._refused = None  # it may have ended, so keep no reference to it
        self.pool.release(sequence.blocks)
        self.host_pool.release(sequence.host_blocks)
        sequence.blocks, sequence.host_blocks = [], []

    def swap_out(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """Swap its computed blocks to the host, if there is room for all of them."""
        count = -(-sequence.computed // self.pool.size)
        if count > self.host_pool.available:
            return False
        host_blocks = self.host_pool.take(count)
        step.swaps_out.extend(zip(sequence.blocks, host_blocks, strict=False))
        step.swapped.append(sequence)
        self.release(sequence)
        sequence.host_blocks, sequence.status = host_blocks, Status.SWAPPED
        sequence.busy += 1
        self.counters.swaps += 1
        return True

    def forget_swap(self, sequence: Sequence) -> None:
        """Undo a swap that was not executed: the sequence is recomputed."""
        if sequence.status is Status.SWAPPED:
            self.release(sequence)
            sequence.status = Status.WAITING
            sequence.busy -= 1

    def _room(self, running: int) -> int:
        """Return the blocks for a newcomer. Running sequences keep room to grow, so that it is not preempted at once."""
        return self.pool.available - running * ROOM_TO_GROW

    def _start(self, sequence: Sequence, room: int) -> bool:
        """Start with cached blocks; at least the last token is computed, since it samples."""
        pool, known = self.pool, len(sequence.tokens)
        blocks, prefix_ids = pool.match(sequence.tokens, sequence.salt, (known - 1) // pool.size)
        if not self._take(sequence, blocks, -(-known // pool.size), room):
            return False
        found = len(blocks) * pool.size
        sequence.computed, sequence.published = found, len(blocks)
        sequence.prefix_id = prefix_ids[-1] if prefix_ids else sequence.salt
        if sequence.rank < 0:
            sequence.cached = found
            self.counters.prefix_queries += known
            self.counters.prefix_hits += found
        return True

    def _fork(self, sequence: Sequence, parent: Sequence, step: ScheduledStep, room: int) -> bool:
        """Start with the parent's blocks; the last prompt token is computed in a copy of its block."""
        full, rest = divmod(sequence.prompt_length - 1, self.pool.size)
        if not self._take(sequence, parent.blocks[:full], full + 1, room):
            return False
        if rest:
            step.copies.append((parent.blocks[full], sequence.blocks[full]))
        sequence.computed, sequence.published, sequence.prefix_id = sequence.prompt_length - 1, 0, sequence.salt
        return True

    def _swap_in(self, sequence: Sequence, step: ScheduledStep, room: int) -> bool:
        if not self._take(sequence, [], -(-len(sequence.tokens) // self.pool.size), room):
            return False
        step.swaps_in.extend(zip(sequence.host_blocks, sequence.blocks, strict=False))
        self.host_pool.release(sequence.host_blocks)
        sequence.host_blocks, sequence.published, sequence.prefix_id = [], 0, sequence.salt
        return True

    def _take(self, sequence: Sequence, shared: list[int], count: int, room: int) -> bool:
        """Take `count` blocks, the shared ones and new ones, all or none."""
        pool = self.pool
        # A cached block that it shares is no longer available.
        need = count - len(shared) + sum(not pool.references(block) for block in shared)
        if need > room:
            self._refused = (sequence, need)
            return False
        for block in shared:
            pool.share(block)
        try:
            sequence.blocks = shared + pool.take(count - len(shared))
        except OutOfBlocks:
            pool.release(shared)
            return False
        sequence.next_block_at = min(count * pool.size, max(sequence.end - 2, len(sequence.tokens)))
        return True

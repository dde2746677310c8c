"""Blocks used on other streams than their own: a freed one is reused only when those streams have caught up.

On a simulated GPU nothing runs, so callers say when a stream has caught up. While allocations go to a private pool
(as in graph capture) no stream can be queried, and such blocks wait until that is over.
"""

from collections.abc import Callable

from tonnage.allocator.blocks import Block, PrivatePool


class StreamUses:
    """The streams that blocks were recorded on, and the freed blocks that wait for them."""

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

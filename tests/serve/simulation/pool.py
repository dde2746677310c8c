"""The real pool of blocks, under watch: it can be told to fail, and it notes what everything in the prefix cache means."""

from serve.simulation.story import key_after, root
from tonnage.serve.blocks import BlockPool, Link, OutOfBlocks


class WatchedPool(BlockPool):
    """`fails_in`: take() raises at that call from now, full or not. `meanings`: of a link, the keys of its block."""

    def __init__(self, count: int, size: int, *, prefix_cache: bool) -> None:
        super().__init__(count, size, prefix_cache=prefix_cache)
        self.fails_in = 0
        self.meanings: dict[Link, list[int]] = {}

    def take(self) -> int:
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                raise OutOfBlocks
        return super().take()

    def publish(self, block: int, parent: Link, tokens: tuple[int, ...]) -> Link:
        link = super().publish(block, parent, tokens)
        if link not in self.meanings:
            before = root(parent) if isinstance(parent, str) else self.meanings[parent][-1]
            self.meanings[link] = [before := key_after(before, token) for token in tokens]
        return link

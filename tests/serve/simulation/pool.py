"""The real pool of blocks, under watch: it can be told to fail, and it notes what everything in the prefix cache means."""

from serve.simulation.story import key_after, root
from tonnage.serve.cache.block_pool import BlockPool, OutOfBlocks, PrefixId, TokenHistory


class WatchedPool(BlockPool):
    """`fails_in`: that block from now is not to be had, whatever there is. `meanings`: of a prefix id, the keys of its block."""

    def __init__(self, count: int, size: int, *, prefix_cache: bool) -> None:
        super().__init__(count, size, prefix_cache=prefix_cache)
        self.fails_in = 0
        self.meanings: dict[PrefixId, list[int]] = {}

    def take(self, number: int) -> list[int]:
        if 0 < self.fails_in <= number:
            self.fails_in = 0
            raise OutOfBlocks
        self.fails_in = max(self.fails_in - number, 0)
        return super().take(number)

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        prefix_id = super().publish(block, parent, history, start)
        if prefix_id not in self.meanings:
            before = root(parent) if isinstance(parent, str) else self.meanings[parent][-1]
            own = history.part(start, start + self.size)
            self.meanings[prefix_id] = [before := key_after(before, token) for token in own]
        return prefix_id

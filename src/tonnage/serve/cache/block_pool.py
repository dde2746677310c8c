"""Blocks of the KV cache by number: reference counts, the free list, and the prefix cache.

All unreferenced blocks are in one ring, the next to be taken first: free ones, then cached ones in LRU order. Block
0 is the null block: it is never handed out, and is the head of the ring.

Every cached block has a prefix id, a number that is never reused. A cached block is found by the prefix id of its
predecessor, and its tokens are compared; if several follow the same block, all but the first are found by that id
and their tokens. The predecessor of a first block is the tenant's salt. So a match has the same tokens from the very
start, by comparison and not by hash alone, within one tenant. Most blocks are the only ones to follow theirs: then
only a number is hashed, and the tokens stay in their sequence's list. When a sequence ends, the tokens still needed
are packed.

This module does not know what is in a block, or on which device.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

PrefixId = int | str
_Key = PrefixId | tuple[PrefixId, tuple[int, ...]]
NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """Every block is referenced."""


class TokenHistory:
    """The tokens of one sequence, in part in the prefix cache: its growing list, packed to what is needed at its end."""

    __slots__ = ("_first", "_last", "_offset", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens: list[int] | array[int] = tokens
        self._offset = 0
        self._first, self._last = -1, 0  # range that is needed

    def __len__(self) -> int:
        return self._offset + len(self._tokens)

    def part(self, start: int, end: int) -> list[int]:
        """Return the tokens from `start` to `end`; once packed, only those that were kept."""
        return list(self._tokens[start - self._offset : end - self._offset])

    def keep(self, start: int, end: int) -> None:
        """Mark this part as needed."""
        if start < self._first or self._first < 0:
            self._first = start
        if end > self._last:
            self._last = end

    def pack(self) -> None:
        """Pack the needed part and release the list, since it no longer grows."""
        first = max(self._first, 0)
        self._tokens, self._offset = array("i", self.part(first, self._last)), first


_NOTHING = (TokenHistory([]), 0)


class BlockPool:
    """`count` blocks of `size` tokens, including the null block."""

    def __init__(self, count: int, size: int = 16, *, prefix_cache: bool = True) -> None:
        assert count > 0 and size > 0
        self.count, self.size, self.prefix_cache = count, size, prefix_cache
        self.available = count - 1  # unreferenced blocks, including cached ones
        self.cached = 0  # of these, how many hold a prefix
        self.shared = 0  # blocks with more than one reference
        self._references = [0] * count
        self._after: list[int] = [*range(1, count), 0]
        self._before: list[int] = [count - 1, *range(count - 1)]
        self._keys: list[_Key | None] = [None] * count
        self._histories = [_NOTHING] * count  # of published blocks: their tokens, and the start index
        self._prefix_ids = [0] * count
        self._last_prefix_id = 0
        self._found: dict[_Key, int] = {}
        self._branches: Counter[PrefixId] = Counter()  # blocks found by this prefix id and their tokens

    def references(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._references[block]

    def take(self, number: int) -> list[int]:
        """Take this many blocks with one reference each, evicting cached ones if needed; raises `OutOfBlocks`."""
        if number > self.available:
            raise OutOfBlocks
        after, references, keys = self._after, self._references, self._keys
        taken, block = [], NULL_BLOCK
        for _ in range(number):
            block = after[block]
            taken.append(block)
            references[block] = 1
            if keys[block] is not None:
                self._forget(block)
        rest = after[block]
        after[NULL_BLOCK], self._before[rest] = rest, NULL_BLOCK
        self.available -= number
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or cached."""
        held = self._references[block]
        if held == 0:
            assert self._keys[block] is not None, f"block {block} is free"
            self._unlink(block)
            self.cached -= 1
        elif held == 1:
            self.shared += 1
        self._references[block] = held + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each. The last goes first, so that the start of a prefix outlives what follows."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            assert left >= 0, f"block {block} is released more often than it was taken"
            self._references[block] = left
            if left == 0:
                # Into the ring: a cached block at its end, a free one at its start.
                if self._keys[block] is None:
                    before, after = NULL_BLOCK, self._after[NULL_BLOCK]
                else:
                    before, after = self._before[NULL_BLOCK], NULL_BLOCK
                    self.cached += 1
                self._before[block], self._after[block] = before, after
                self._after[before] = self._before[after] = block
                self.available += 1
            elif left == 1:
                self.shared -= 1

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        """Offer a full, held, final block that follows `parent` (a prefix id, or the salt); return the prefix id in use."""
        end = start + self.size
        assert len(history) >= end and self._references[block] > 0
        if self._keys[block] is not None:
            return self._prefix_ids[block]
        known = self._find(parent, history, start)
        if known is not None:
            return self._prefix_ids[known]
        key: _Key = parent
        if parent in self._found:
            key = (parent, tuple(history.part(start, end)))
            self._branches[parent] += 1
        history.keep(start, end)
        self._found[key], self._keys[block], self._histories[block] = block, key, (history, start)
        self._last_prefix_id = prefix_id = self._last_prefix_id + 1
        self._prefix_ids[block] = prefix_id
        return prefix_id

    def match(self, tokens: list[int], salt: str, most: int | None = None) -> tuple[list[int], list[PrefixId]]:
        """Return blocks and prefix ids of the longest cached prefix, up to `most` blocks. Call `share` to hold them."""
        blocks: list[int] = []
        prefix_ids: list[PrefixId] = []
        size, prefix_id, history = self.size, salt, TokenHistory(tokens)  # type: int, PrefixId, TokenHistory
        most = len(tokens) // size if most is None else most
        for first in range(0, most * size, size):
            block = self._find(prefix_id, history, first)
            if block is None:
                break
            prefix_id = self._prefix_ids[block]
            blocks.append(block)
            prefix_ids.append(prefix_id)
        return blocks, prefix_ids

    def _find(self, parent: PrefixId, history: TokenHistory, start: int) -> int | None:
        """Return the published block with these tokens that follows this parent."""
        block = self._found.get(parent)
        if block is None and parent not in self._branches:
            return None
        tokens = history.part(start, start + self.size)
        if block is not None:
            own, first = self._histories[block]
            if own.part(first, first + self.size) == tokens:
                return block
        return self._found.get((parent, tuple(tokens))) if parent in self._branches else None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._found[key]
        if isinstance(key, tuple):
            self._branches[key[0]] -= 1
            if not self._branches[key[0]]:
                del self._branches[key[0]]
        self._keys[block], self._histories[block] = None, _NOTHING
        self.cached -= 1

    def _unlink(self, block: int) -> None:
        before, after = self._before[block], self._after[block]
        self._after[before], self._before[after] = after, before
        self.available -= 1

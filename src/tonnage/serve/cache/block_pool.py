"""Blocks of the KV cache as numbers: who holds which, which are free, and which hold a prefix that can be used again.

All blocks that nobody holds are in one ring, the next to be taken first: free ones, then cached ones, the least recently
used first. Block 0 is the null block: it is never handed out, and serves as the ring's knot.

Every block in the prefix cache has a prefix id, a number that is never given twice. A cached block is found by the prefix id of
the block before it, and its tokens are compared; where several follow the same block, all but the first are found by that id
and their tokens. Before the first block stands the tenant's salt. So what is found has the same tokens from the very start,
by comparison and not by hash alone, and is the same tenant's. Most blocks that are filled are the only ones to follow theirs:
so nothing is hashed then but a number, and the tokens stay where they are, in the list of their sequence. Of a sequence that
has ended, those that are kept are packed.

This module does not know what lies in a block, nor on which device.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

PrefixId = int | str
_Key = PrefixId | tuple[PrefixId, tuple[int, ...]]
NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """Every block is held by somebody."""


class TokenHistory:
    """The tokens of one sequence, parts of which are in the prefix cache: its own list, which only grows, until it has ended.

    Packed, they are a tenth, and only what is kept: a long prompt of which all but the end was found elsewhere is not.
    """

    __slots__ = ("_first", "_last", "_offset", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens: list[int] | array[int] = tokens
        self._offset = 0
        self._first, self._last = -1, 0  # of what is kept

    def __len__(self) -> int:
        return self._offset + len(self._tokens)

    def part(self, start: int, end: int) -> list[int]:
        """The tokens from `start` to `end`; once it is packed, only those that were kept."""
        return list(self._tokens[start - self._offset : end - self._offset])

    def keep(self, start: int, end: int) -> None:
        """Somebody will ask for this part."""
        if start < self._first or self._first < 0:
            self._first = start
        if end > self._last:
            self._last = end

    def pack(self) -> None:
        """It grows no longer. The list is let go."""
        first = max(self._first, 0)
        self._tokens, self._offset = array("i", self.part(first, self._last)), first


_NOTHING = (TokenHistory([]), 0)


class BlockPool:
    """`count` blocks of `size` tokens, the null block among them."""

    def __init__(self, count: int, size: int = 16, *, prefix_cache: bool = True) -> None:
        assert count > 0 and size > 0
        self.count, self.size, self.prefix_cache = count, size, prefix_cache
        self.available = count - 1  # blocks that nobody holds, cached ones included
        self.cached = 0  # of these, how many hold a prefix
        self.shared = 0  # blocks with more than one reference
        self._references = [0] * count
        self._after: list[int] = [*range(1, count), 0]
        self._before: list[int] = [count - 1, *range(count - 1)]
        self._keys: list[_Key | None] = [None] * count
        self._histories = [_NOTHING] * count  # of published blocks: where their tokens are, and from which on
        self._prefix_ids = [0] * count
        self._last_prefix_id = 0
        self._found: dict[_Key, int] = {}
        self._branches: Counter[PrefixId] = Counter()  # blocks that are found by this prefix id and their tokens

    def references(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._references[block]

    def take(self, number: int) -> list[int]:
        """So many blocks, or none, each for one holder, to be written; cached ones where no others are left."""
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
        """One more holder of a block that is held or cached."""
        held = self._references[block]
        if held == 0:
            assert self._keys[block] is not None, f"block {block} is free"
            self._unlink(block)
            self.cached -= 1
        elif held == 1:
            self.shared += 1
        self._references[block] = held + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The last goes first, so that the start of a prefix outlives what follows it."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            assert left >= 0, f"block {block} is released more often than it was taken"
            self._references[block] = left
            if left == 0:
                self._link(block)
            elif left == 1:
                self.shared -= 1

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        """Offer a full block, held and final, for reuse; its prefix id, or that of an equal block that was there before.

        `parent` is the prefix id of the block before it, or the salt where there is none. Its own tokens begin at `start`.
        """
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
        """The longest cached prefix, of `most` blocks at most: blocks and their prefix ids. Nothing is held yet: `share` them."""
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
        """The published block with these tokens that follows this one."""
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
        """It can be found no longer."""
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

    def _link(self, block: int) -> None:
        """Into the ring: a cached block at its end, a free one at its start."""
        if self._keys[block] is None:
            before, after = NULL_BLOCK, self._after[NULL_BLOCK]
        else:
            before, after = self._before[NULL_BLOCK], NULL_BLOCK
            self.cached += 1
        self._before[block], self._after[block] = before, after
        self._after[before] = self._before[after] = block
        self.available += 1

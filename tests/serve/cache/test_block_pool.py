from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tonnage.serve.cache.block_pool import BlockPool, OutOfBlocks, TokenHistory

TOKENS = st.tuples(st.integers(0, 1), st.integers(0, 1))


def published(pool: BlockPool, *chain: tuple[int, ...], salt: str = "") -> list[int]:
    """Blocks of one sequence, one for each of these, all published and still held."""
    blocks, prefix_id = [], salt
    for tokens in chain:
        blocks.append(pool.take(1)[0])
        prefix_id = pool.publish(blocks[-1], prefix_id, TokenHistory(list(tokens)))
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.take(1)[0] for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    assert pool.available == 0


def test_a_pool_of_the_null_block_alone_has_nothing() -> None:
    with pytest.raises(OutOfBlocks):
        BlockPool(1).take(1)


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    block = pool.take(1)[0]
    pool.share(block)
    assert (pool.references(block), pool.shared) == (2, 1)
    pool.release([block])
    assert (pool.references(block), pool.shared, pool.available) == (1, 0, 1)
    pool.release([block])
    assert (pool.references(block), pool.available) == (0, 2)


def test_a_block_that_is_released_too_often_is_our_mistake() -> None:
    pool = BlockPool(3)
    block = pool.take(1)[0]
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} is released more often"):
        pool.release([block])


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="block 1 is free"):
        BlockPool(3).share(1)


def test_the_longest_known_prefix_is_found() -> None:
    pool = BlockPool(8, 2)
    first, second = published(pool, (1, 2), (3, 4))
    assert pool.match([1, 2, 3, 4, 5], "")[0] == [first, second]
    assert pool.match([1, 2, 3, 4, 5], "", most=1)[0] == [first]
    assert pool.match([1, 2, 3, 5], "")[0] == [first]
    assert pool.match([1, 2, 3], "")[0] == [first]
    assert pool.match([3, 4], "")[0] == []


def test_a_packed_text_is_found_and_compared_like_any_other() -> None:
    pool, tokens = BlockPool(9, 2), [2**31 - 1, 0, 7, 7]
    history, blocks, prefix_id = TokenHistory(tokens), pool.take(2), ""
    for index, block in enumerate(blocks):
        prefix_id = pool.publish(block, prefix_id, history, 2 * index)
    history.pack()
    assert history.part(0, 4) == tokens and len(history) == 4
    assert pool.match(tokens, "")[0] == blocks
    assert pool.match([*tokens[:2], 7, 8], "")[0] == blocks[:1]
    assert pool.publish(pool.take(1)[0], "", TokenHistory(tokens[:])) == pool.match(tokens, "")[1][0]


def test_of_a_text_that_ended_only_what_is_kept_stays() -> None:
    """A chat, each turn of which finds all but its end: what is kept grows with what is cached, not with its square."""
    pool, tokens, histories = BlockPool(500, 2), [], []
    for turn in range(100):
        tokens = [*tokens, turn, turn + 1, turn + 2, turn + 3]
        blocks, prefix_ids = pool.match(tokens, "")
        history, prefix_id = TokenHistory(tokens), prefix_ids[-1] if prefix_ids else ""
        for index in range(len(blocks), len(tokens) // 2):
            prefix_id = pool.publish(pool.take(1)[0], prefix_id, history, 2 * index)
        history.pack()
        histories.append(history)
    assert sum(len(history._tokens) for history in histories) == len(tokens) == 400
    assert len(pool.match(tokens, "")[0]) == 200


def test_an_equal_block_is_found_though_the_first_that_followed_the_same_is_gone() -> None:
    pool = BlockPool(4, 2)
    (first,), (second,) = published(pool, (1, 1)), published(pool, (2, 2))
    pool.release([first])
    pool.take(1)
    assert pool.take(1)[0] == first and pool.match([1, 1], "")[0] == []
    (prefix_id,) = pool.match([2, 2], "")[1]
    pool.release([first])
    assert pool.publish(pool.take(1)[0], "", TokenHistory([2, 2])) == prefix_id and pool.match([2, 2], "")[0] == [
        second
    ]


def test_a_prefix_is_the_tenants_own() -> None:
    pool = BlockPool(8, 2)
    (block,) = published(pool, (1, 2), salt="a")
    assert pool.match([1, 2], "a")[0] == [block]
    assert pool.match([1, 2], "b")[0] == pool.match([1, 2], "")[0] == []


def test_equal_blocks_are_published_once() -> None:
    pool = BlockPool(8, 2)
    first, second = published(pool, (1, 2), (3, 4))
    twin, third = published(pool, (1, 2), (5, 6))
    assert pool.match([1, 2, 3, 4], "")[0] == [first, second]
    assert pool.match([1, 2, 5, 6], "")[0] == [first, third]
    pool.release([twin])
    assert pool.cached == 0


def test_a_prefix_outlives_its_holder_until_its_room_is_needed() -> None:
    pool = BlockPool(5, 2)
    old = published(pool, (1, 1), (2, 2))
    new = published(pool, (3, 3))
    pool.release(old)
    pool.release(new)
    assert (pool.available, pool.cached) == (4, 3)
    taken = pool.take(2)
    # The free block first, then the end of the prefix that was let go first.
    assert taken[1] == old[1]
    assert pool.match([1, 1, 2, 2], "")[0] == old[:1]
    assert pool.match([3, 3], "")[0] == new


def test_a_match_makes_a_block_young_again() -> None:
    pool = BlockPool(3, 2)
    (old,), (new,) = published(pool, (1, 1)), published(pool, (2, 2))
    pool.release([old])
    pool.release([new])
    pool.share(old)
    assert (pool.available, pool.cached) == (1, 1)
    pool.release([old])
    assert pool.take(1)[0] == new


def test_what_follows_an_evicted_block_is_not_found_under_its_successor() -> None:
    """A prefix id is never given twice: the same tokens, published again, are a new prefix."""
    pool = BlockPool(4, 2)
    first, second = published(pool, (1, 1), (2, 2))
    pool.release([first])
    assert pool.take(2)[1] == first
    pool.release([first])
    (again,) = published(pool, (9, 9))
    assert again == first
    assert pool.match([1, 1, 2, 2], "")[0] == pool.match([9, 9, 2, 2], "")[0][1:] == []
    assert pool.references(second) == 1


class Pool(RuleBasedStateMachine):
    """Sequences of two-token blocks, held against plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(chain=st.lists(TOKENS, min_size=1, max_size=4), salt=st.sampled_from(["", "a"]))
    def start(self, chain: list[tuple[int, ...]], salt: str) -> None:
        tokens = [token for each in chain for token in each]
        blocks, prefix_ids = self.pool.match(tokens, salt)
        for index, block in enumerate(blocks):
            assert self.content[block] == (salt, tuple(tokens[: 2 * index + 2]))
            self.pool.share(block)
        prefix_id = prefix_ids[-1] if prefix_ids else salt
        history = TokenHistory(tokens)
        for index in range(len(blocks), len(chain)):
            if not self.pool.available:
                with pytest.raises(OutOfBlocks):
                    self.pool.take(1)
                self.pool.release(blocks)
                return
            block = self.pool.take(1)[0]
            assert not any(block in table for table in (*self.tables, blocks))
            prefix_id = self.pool.publish(block, prefix_id, history, 2 * index)
            self.content[block] = (salt, tuple(tokens[: 2 * index + 2]))
            blocks.append(block)
        self.tables.append(blocks)
        if len(tokens) % 3 == 0:
            history.pack()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def adds_up(self) -> None:
        held = Counter(block for table in self.tables for block in table)
        assert [self.pool.references(block) for block in range(7)] == [held[block] for block in range(7)]
        assert self.pool.available == 6 - len(held)
        assert self.pool.shared == sum(holders > 1 for holders in held.values())
        assert 0 <= self.pool.cached <= self.pool.available


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_a_pool_adds_up_whatever_is_done = Pool.TestCase

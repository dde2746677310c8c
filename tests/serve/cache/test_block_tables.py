import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.driver import SIZE
from tonnage.serve.cache.block_pool import BlockPool, OutOfBlocks
from tonnage.serve.cache.block_tables import BlockTables
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status


def tables(usable: int, host_blocks: int = 0) -> BlockTables:
    return BlockTables(BlockPool(usable + 1, SIZE), host_blocks)


def sequence(*tokens: int, end: int = 100, **more: object) -> Sequence:
    return Sequence(0, list(tokens), Sampling(), len(tokens), end=end, **more)


def running(tables: BlockTables, one: Sequence) -> Sequence:
    """A sequence with blocks, all of whose tokens but the last are computed by steps that are complete."""
    assert tables.give(one, ScheduledStep(0), 0)
    one.status, one.slot, one.computed = Status.RUNNING, 0, len(one.tokens) - 1
    return one


def test_each_that_runs_keeps_room_to_grow_but_one_alone_needs_none() -> None:
    made = tables(4)
    one = sequence(*range(16))
    assert not made.give(one, ScheduledStep(0), running=1) and one.blocks == [] and made.pool.available == 4
    assert made.give(one, ScheduledStep(0), running=0) and len(one.blocks) == 4


def test_who_was_refused_does_not_look_again_before_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made, looks, match = tables(4), [], BlockPool.match
    monkeypatch.setattr(BlockPool, "match", lambda *words: looks.append(1) or match(*words))
    one = sequence(*range(12))
    taken = made.pool.take(1)[0]
    for _ in range(5):
        assert not made.give(one, ScheduledStep(0), running=1)
    assert len(looks) == 1
    made.pool.release([taken])
    assert not made.give(one, ScheduledStep(0), running=1)
    assert made.give(one, ScheduledStep(0), running=0) and len(looks) == 2


def test_who_was_refused_and_ended_is_forgotten() -> None:
    pool = tables(3)
    running(pool, sequence(1, 2))
    refused = sequence(*range(9))
    assert not pool.give(refused, ScheduledStep(0, budget=64), running=1)
    pool.release(refused)
    assert not any(holder is pool._refused for holder in gc.get_referrers(refused))


def test_the_next_block_is_needed_where_blocks_are_full_or_the_last_token_is_drawn() -> None:
    made, builder = tables(4), ScheduledStep(0)
    one = running(made, sequence(1, 2, 3, 4, end=12))
    edges = []
    for _ in range(4):
        made.grow([one], builder)
        edges.append((one.next_block_at, len(one.blocks)))
    assert edges == [(8, 2), (10, 3), (10, 3), (10, 3)]
    assert builder.grown == [(one, 1), (one, 2)]


@pytest.mark.parametrize(("end", "edge"), [(4, 3), (5, 3), (6, 4), (7, 4), (100, 4)])
def test_the_first_edge(end: int, edge: int) -> None:
    one = running(tables(4), sequence(1, 2, 3, end=end))
    assert one.next_block_at == edge


def test_without_a_block_there_is_no_growth() -> None:
    made, builder = tables(1), ScheduledStep(0)
    one = running(made, sequence(1, 2, 3, 4))
    one.computed = 4
    with pytest.raises(OutOfBlocks):
        made.grow([one], builder)
    assert (one.next_block_at, len(one.blocks), builder.grown) == (4, 1, [])


def test_only_what_is_complete_is_published() -> None:
    made = tables(8)
    one = running(made, sequence(*range(10)))
    one.computed, one.busy = 10, 1
    made.publish(one)
    assert made.pool.match(one.tokens, "")[0] == []
    made.publish(one, 4)
    assert made.pool.match(one.tokens, "")[0] == one.blocks[:1]
    one.busy = 0
    made.publish(one)
    assert made.pool.match(one.tokens, "")[0] == one.blocks[:2]


def test_a_fork_goes_on_with_the_chain_of_its_parent() -> None:
    made, builder = tables(8), ScheduledStep(0)
    parent = running(made, sequence(*range(9)))
    parent.computed = 9
    made.publish(parent)
    child = sequence(*range(9), parent=parent)
    assert made.give(child, builder, running=1)
    assert child.blocks[:2] == parent.blocks[:2] and builder.copies == []
    child.tokens.extend(range(9, 13))
    child.status, child.slot, child.computed = Status.RUNNING, 1, 12
    made.publish(child)
    assert made.pool.match([*range(13)], "")[0] == child.blocks


@given(prompt=st.integers(1, 30), host_blocks=st.integers(0, 10), computed=st.data())
def test_what_is_swapped_out_comes_back_block_by_block(prompt: int, host_blocks: int, computed: st.DataObject) -> None:
    made, away, back = tables(10, host_blocks), ScheduledStep(0), ScheduledStep(0)
    one = running(made, sequence(*range(prompt)))
    one.computed = computed.draw(st.integers(1, prompt))
    held = one.blocks
    needed = -(-one.computed // SIZE)
    assert made.swap_out(one, away) == (needed <= host_blocks)
    if one.status is not Status.SWAPPED:
        assert (one.blocks, away.swaps_out, made.host_pool.available) == (held, [], host_blocks)
        return
    assert made.pool.available == 10 and made.host_pool.available == host_blocks - needed
    assert [block for block, _ in away.swaps_out] == held[:needed]
    assert made.give(one, back, running=0)
    assert [host for host, _ in back.swaps_in] == [host for _, host in away.swaps_out]
    assert [block for _, block in back.swaps_in] == one.blocks[:needed]
    assert len(one.blocks) == len(held) and made.host_pool.available == host_blocks

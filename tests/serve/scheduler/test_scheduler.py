"""The state machine, one rule at a time. All of them at once, under faults, are the business of `simulation`."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.driver import SIZE, Driver, counted
from tonnage.serve.cache.block_pool import OutOfBlocks
from tonnage.serve.scheduler.queue import NeverFits, QueueFull
from tonnage.serve.scheduler.scheduler import AHEAD
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status


def shape(step: ScheduledStep | None) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Who decodes, and the chunks, by number."""
    assert step is not None
    return [work.sequence.id for work in step.decodes], [
        (work.sequence.id, work.start, work.count) for work in step.chunks
    ]


def all_free(driver: Driver) -> bool:
    scheduler = driver.scheduler
    return not scheduler.has_work and driver.pool.available == driver.pool.count - 1 and host_free(driver)


def host_free(driver: Driver) -> bool:
    return driver.scheduler.host_pool.available == driver.scheduler.host_pool.count - 1


class TestSteps:
    def test_decodes_come_first_then_chunks_within_the_budget(self) -> None:
        driver = Driver(batched_tokens=10)
        driver.add(4)
        driver.add(12)
        driver.add(5)
        assert shape(driver.turn()) == ([], [(0, 0, 4), (1, 0, 6)])
        assert shape(driver.turn()) == ([0], [(1, 6, 6), (2, 0, 3)])
        assert shape(driver.turn()) == ([0, 1], [(2, 3, 2)])
        assert shape(driver.turn()) == ([0, 1, 2], [])

    def test_only_the_last_chunk_of_a_prompt_draws(self) -> None:
        driver = Driver(batched_tokens=4)
        sequence = driver.add(7)
        first, second = driver.turn(), driver.turn()
        assert first is not None and first.samplers == [] and first.tokens == 4
        assert second is not None and second.samplers == [sequence] and second.tokens == 3

    def test_more_decode_than_the_budget_allows_and_the_oldest_go_on(self) -> None:
        driver = Driver(batched_tokens=2)
        family = [driver.add(1, tokens=4) for _ in range(3)]
        driver.finish()
        assert [sequence.output for sequence in family] == [counted(sequence) for sequence in family]

    def test_no_more_run_than_there_are_slots(self) -> None:
        driver = Driver(max_seqs=2)
        family = [driver.add(3, tokens=2) for _ in range(5)]
        driver.turn()
        assert sorted(sequence.slot for sequence in family) == [-1, -1, -1, 0, 1]
        driver.finish()
        assert all(max(len(step.decodes), len(step.chunks)) <= 2 for step in driver.steps)

    def test_what_is_in_flight_counts_towards_the_end(self) -> None:
        driver = Driver()
        sequence = driver.add(3, tokens=2)
        assert driver.launch() and driver.launch()
        assert sequence.in_flight == sequence.sampled == 2 and sequence.length == 5
        assert driver.launch() is None
        assert driver.land() == []
        assert driver.land() == [sequence]
        assert (sequence.output, sequence.finish_reason) == (counted(sequence), "length")

    def test_the_context_ends_a_sequence_too(self) -> None:
        driver = Driver(context=6)
        sequence = driver.add(4, tokens=100)
        driver.finish()
        assert (len(sequence.tokens), sequence.finish_reason) == (6, "length")

    def test_the_end_is_found_a_step_late_and_the_row_in_vain_is_dropped(self) -> None:
        driver = Driver()
        sequence = driver.add([10, 11], eos_ids=frozenset({13}))
        driver.launch()
        driver.launch()
        driver.land()
        driver.launch()
        assert driver.land() == [sequence]
        assert (sequence.output, sequence.finish_reason, sequence.in_flight) == ([12, 13], "stop", 0)
        assert all_free(driver)
        assert driver.land() == []
        assert sequence.output == [12, 13]

    def test_the_blocks_and_the_slot_of_one_that_ended_serve_another_at_once(self) -> None:
        driver = Driver(2, max_seqs=1, prefix_cache=False)
        ended = driver.add([10, 11, 12, 13], tokens=4, eos_ids=frozenset({14}))
        other = driver.add(5, tokens=1)
        driver.launch()
        driver.launch()
        driver.land()
        step = driver.launch()
        assert ended.status is Status.FINISHED and step is not None
        assert [work.sequence for work in step.chunks] == [other]
        driver.land()
        driver.land()
        assert other.output == counted(other) and all_free(driver)


class TestCompletions:
    def test_a_second_one_is_passed_over(self) -> None:
        driver = Driver()
        sequence = driver.add(3)
        driver.launch()
        step, tokens = driver.flying[0]
        driver.land()
        assert driver.scheduler.complete(step, tokens) == []
        assert driver.scheduler.fail(step) == []
        assert sequence.output == tokens

    def test_one_that_comes_too_early_waits_for_those_before_it(self) -> None:
        driver = Driver()
        sequence = driver.add(3, tokens=3)
        for _ in range(3):
            driver.launch()
        first, second, third = driver.flying
        assert driver.scheduler.complete(*third) == driver.scheduler.complete(*second) == []
        assert sequence.output == []
        assert driver.scheduler.complete(*first) == [sequence]
        assert sequence.output == counted(sequence)

    def test_a_wrong_number_of_tokens_is_our_mistake(self) -> None:
        driver = Driver()
        driver.add(3)
        step = driver.launch()
        assert step is not None
        with pytest.raises(AssertionError):
            driver.scheduler.complete(step, [])

    def test_a_step_that_failed_ends_its_own_sequences_only(self) -> None:
        driver = Driver(batched_tokens=8, prefix_cache=False)
        own, other = driver.add(8), driver.add(8, tokens=3)
        step = driver.launch()
        assert step is not None
        driver.flying.clear()
        assert driver.scheduler.fail(step) == [own]
        assert (own.finish_reason, own.blocks, own.slot) == ("error", [], -1)
        driver.finish()
        assert other.output == counted(other) and all_free(driver)

    def test_a_failure_that_shows_late_drops_what_was_launched_after_it(self) -> None:
        driver = Driver()
        own = driver.add(4)
        driver.launch()
        other = driver.add(4, tokens=2)
        driver.launch()
        failed, _ = driver.flying.pop(0)
        assert driver.scheduler.fail(failed) == [own]
        driver.finish()
        assert own.output == [] and other.output == counted(other) and all_free(driver)

    def test_nothing_of_a_failed_step_is_found_in_the_prefix_cache(self) -> None:
        driver = Driver()
        driver.add(list(range(9)))
        driver.launch()
        again = driver.add(list(range(9)))
        driver.launch()
        driver.scheduler.fail(driver.flying[0][0])
        assert again.cached == 0
        assert driver.pool.match(list(range(9)), "")[0] == []


def _waiting(driver: Driver) -> Sequence:
    driver.add(SIZE * 4)
    return driver.add(SIZE * 4)


def _half_filled(driver: Driver) -> Sequence:
    sequence = driver.add(24)
    driver.turns(2)
    assert sequence.computed == 16
    return sequence


def _just_launched(driver: Driver) -> Sequence:
    sequence = driver.add(5)
    driver.launch()
    return sequence


def _two_in_flight(driver: Driver) -> Sequence:
    sequence = driver.add(5)
    driver.launch()
    driver.launch()
    return sequence


def _last_in_flight(driver: Driver) -> Sequence:
    sequence = driver.add(5, tokens=1)
    driver.launch()
    return sequence


def _preempted(driver: Driver) -> Sequence:
    """The second of two that fill the pool, and its token still in flight."""
    driver.add(16, tokens=20)
    sequence = driver.add(12, tokens=20)
    while not sequence.preemptions:
        driver.launch()
        if not sequence.preemptions and len(driver.flying) > 1:
            driver.land()
    assert sequence.in_flight == 1
    return sequence


def _parent(driver: Driver) -> Sequence:
    parent, *_ = driver.answers_per_prompt(6, tokens=3, n=3)
    driver.launch()
    return parent


def _aside(driver: Driver) -> Sequence:
    return driver.answers_per_prompt(6, tokens=3, n=3)[1]


def _forked(driver: Driver) -> Sequence:
    family = driver.answers_per_prompt(6, tokens=6, n=3)
    driver.turns(4)
    assert family[1].status is Status.RUNNING
    return family[1]


STATES = [_waiting, _half_filled, _just_launched, _two_in_flight, _last_in_flight, _preempted, _parent, _aside, _forked]


class TestAborts:
    @pytest.mark.parametrize("host_blocks", [0, 8])
    @pytest.mark.parametrize("state", STATES)
    def test_it_gives_everything_back_and_disturbs_nobody(
        self, state: Callable[[Driver], Sequence], host_blocks: int
    ) -> None:
        driver = Driver(9, batched_tokens=8 if state is _half_filled else 64, host_blocks=host_blocks)
        sequence = state(driver)
        known = list(sequence.tokens)
        everyone = {*driver.scheduler.running, *driver.scheduler.waiting}
        assert driver.scheduler.abort(sequence)
        assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
        assert (sequence.blocks, sequence.host_blocks, sequence.slot, sequence.in_flight) == ([], [], -1, 0)
        assert not driver.scheduler.abort(sequence)
        driver.finish()
        assert sequence.tokens == known
        assert all(other.output == counted(other) for other in everyone - {sequence})
        assert all_free(driver)

    def test_one_that_was_never_added_is_not_there(self) -> None:
        driver = Driver()
        assert not driver.scheduler.abort(driver.sequence(3))

    def test_the_reason_can_be_another(self) -> None:
        driver = Driver()
        sequence = driver.add(3)
        driver.turns(2)
        driver.scheduler.abort(sequence, "stop")
        driver.scheduler.abort(sequence, "abort")
        assert sequence.finish_reason == "stop"


class TestPreemption:
    def test_the_newest_makes_room_and_comes_back_with_the_same_tokens(self) -> None:
        driver = Driver(5, prefix_cache=False)
        old, new = driver.add(8, tokens=10), driver.add(4, tokens=10)
        driver.finish()
        assert (old.preemptions, new.preemptions) == (0, 1)
        assert old.output == counted(old) and new.output == counted(new)
        assert driver.scheduler.counters.preemptions == 1

    def test_one_whose_token_is_in_flight_comes_back_when_it_is_known(self) -> None:
        driver = Driver(9)
        sequence = _preempted(driver)
        other = next(iter(driver.scheduler.running))
        driver.scheduler.abort(other)
        while sequence.in_flight:
            assert driver.launch() is None or sequence.status is Status.WAITING
            driver.land()
        step = driver.launch()
        assert step is not None
        assert [work.sequence for work in step.chunks] == [sequence]
        assert sequence.computed == len(sequence.tokens)

    def test_who_awaits_its_last_token_is_not_preempted(self) -> None:
        """Its blocks are free as soon as that comes; the older one waits so long, and nothing is computed twice."""
        driver = Driver(4, prefix_cache=False)
        old, new = driver.add(4, tokens=10), driver.add(3, tokens=2)
        for _ in range(10):
            driver.launch()
        assert new.status is Status.RUNNING and new.in_flight == 2 and old.computed == 3 * SIZE
        driver.finish()
        assert old.output == counted(old) and new.output == counted(new) and not new.preemptions
        assert sum(work.count for step in driver.steps for work in (*step.decodes, *step.chunks)) == 4 + 9 + 3 + 1

    def test_the_newest_waits_a_step_out_rather_than_losing_all(self) -> None:
        driver = Driver(5, prefix_cache=False)
        _, new = driver.add(7, tokens=3), driver.add(2, tokens=4)
        for _ in range(3):
            driver.launch()
        driver.pool.take(1)
        assert driver.pool.available == 0 and new.computed == SIZE
        assert driver.launch() is None and new.status is Status.RUNNING
        driver.finish()
        assert new.preemptions == 0 and new.output == counted(new)

    def test_nobody_is_let_in_again_before_room_was_made(self) -> None:
        """What was preempted for want of a block does not fit beside the one that took it: no thrash."""
        driver = Driver(8, prefix_cache=False)
        family = [driver.add(8, tokens=20) for _ in range(2)]
        driver.finish()
        assert driver.scheduler.counters.preemptions == 1
        assert all(sequence.output == counted(sequence) for sequence in family)

    def test_it_goes_before_those_who_have_not_run(self) -> None:
        driver = Driver(9)
        sequence = _preempted(driver)
        driver.add(1, tokens=1)
        assert next(iter(driver.scheduler.waiting)) is driver.scheduler.waiting.first() is sequence

    def test_what_it_finds_again_is_no_hit(self) -> None:
        driver = Driver(9)
        sequence = _preempted(driver)
        driver.finish()
        counters = driver.scheduler.counters
        assert (counters.prefix_queries, counters.prefix_hits, sequence.cached) == (28, 0, 0)

    def test_a_lone_sequence_that_just_fits_runs_to_its_end(self) -> None:
        driver = Driver(1)
        sequence = driver.add(2, tokens=3)
        driver.finish()
        assert sequence.output == counted(sequence) and all_free(driver)

    def test_one_after_another_through_a_pool_of_one_block(self) -> None:
        driver = Driver(1)
        family = [driver.add(prompt, tokens=5 - prompt) for prompt in (1, 2, 3, 4)] + driver.answers_per_prompt(
            2, tokens=3, n=3
        )
        driver.finish()
        assert all(sequence.output == counted(sequence) for sequence in family) and all_free(driver)


class TestSwaps:
    def swapped(self, **limits: int) -> tuple[Driver, Sequence, Sequence, ScheduledStep]:
        """Two sequences, the second of which was just swapped out by a step that is in flight."""
        driver = Driver(7, prefix_cache=False, **({"host_blocks": 8} | limits))
        old, new = driver.add(12, tokens=16), driver.add(8, tokens=12)
        while not new.preemptions:
            step = driver.turn()
        assert step is not None
        return driver, old, new, step

    def test_what_was_computed_is_kept_on_the_host_and_not_computed_again(self) -> None:
        driver, old, new, step = self.swapped()
        kept = new.computed
        assert new.status is Status.SWAPPED and len(new.host_blocks) == len(step.swaps_out) == -(-kept // SIZE)
        driver.finish()
        (back,) = [step for step in driver.steps if step.swaps_in]
        assert [host for _, host in step.swaps_out] == [host for host, _ in back.swaps_in]
        assert [(work.sequence, work.start, work.count) for work in back.chunks] == [(new, kept, 1)]
        assert new.output == counted(new) and old.output == counted(old)
        assert driver.scheduler.counters.swaps == 1 and all_free(driver)

    def test_without_room_on_the_host_it_is_computed_again(self) -> None:
        driver, _, new, step = self.swapped(host_blocks=1)
        assert new.status is Status.WAITING and step.swaps_out == []
        driver.finish()
        assert new.output == counted(new) and driver.scheduler.counters.swaps == 0

    def test_a_copy_that_failed_is_not_read(self) -> None:
        driver, old, new, step = self.swapped()
        driver.flying = [flight for flight in driver.flying if flight[0] is not step]
        assert driver.scheduler.fail(step) == [old]
        assert new.status is Status.WAITING and host_free(driver)
        driver.finish()
        assert new.output == counted(new) and all_free(driver)

    def test_it_does_not_come_back_before_the_copy_is_complete(self) -> None:
        driver, old, new, step = self.swapped()
        driver.scheduler.abort(old)
        while driver.flying[0][0] is not step:
            driver.land()
        assert not new.in_flight and driver.launch() is None
        driver.land()
        back = driver.launch()
        assert back is not None and back.swaps_in

    def test_an_abort_while_it_lies_on_the_host(self) -> None:
        driver, old, new, _ = self.swapped()
        assert driver.scheduler.abort(new) and host_free(driver)
        driver.finish()
        assert old.output == counted(old) and all_free(driver)


class TestDraws:
    def test_the_parent_computes_the_prompt_and_the_others_share_it(self) -> None:
        driver = Driver()
        parent, *others = driver.answers_per_prompt(10, n=3)
        driver.turns(2)
        assert all(other.status is Status.WAITING for other in others)
        step = driver.turn()
        assert step is not None
        assert [(work.sequence, work.start, work.count) for work in step.chunks] == [(other, 9, 1) for other in others]
        assert all(other.blocks[:2] == parent.blocks[:2] for other in others)
        assert step.copies == [(parent.blocks[2], other.blocks[2]) for other in others]
        driver.finish()
        assert all(other.output == counted(other) for other in others) and all_free(driver)

    def test_a_block_that_begins_with_the_last_token_need_not_be_copied(self) -> None:
        driver = Driver()
        parent, other = driver.answers_per_prompt(2 * SIZE + 1)
        driver.turns(2)
        step = driver.turn()
        assert step is not None and step.copies == []
        assert other.blocks[:2] == parent.blocks[:2] and other.blocks[2] != parent.blocks[2]

    def test_without_a_block_for_the_copy_they_wait(self) -> None:
        driver = Driver(4, prefix_cache=False)
        parent, other = driver.answers_per_prompt(14, tokens=2)
        driver.launch()
        driver.launch()
        driver.land()
        assert driver.launch() is None and other.status is Status.WAITING
        assert driver.pool.shared == 0
        driver.finish()
        assert parent.output == counted(parent) and other.output == counted(other) and all_free(driver)

    def test_without_their_parent_they_are_like_any_other(self) -> None:
        driver = Driver(prefix_cache=False)
        parent, *others = driver.answers_per_prompt(10, n=3)
        driver.launch()
        driver.scheduler.abort(parent)
        assert [work.sequence for work in driver.scheduler.schedule().chunks] == others

    def test_a_parent_nobody_knows_is_not_waited_for(self) -> None:
        driver = Driver()
        stranger = driver.sequence(5)
        child = driver.add(5, tokens=2, parent=stranger)
        driver.finish()
        assert child.output == counted(child)

    def test_forks_are_neither_asked_for_nor_found_in_the_prefix_cache(self) -> None:
        driver = Driver()
        driver.answers_per_prompt(10, n=4)
        driver.finish()
        assert (driver.scheduler.counters.prefix_queries, driver.scheduler.counters.prefix_hits) == (10, 0)


class TestPrefixes:
    def test_what_is_cached_is_not_computed(self) -> None:
        driver = Driver()
        driver.add(list(range(9)), tokens=1)
        driver.finish()
        again = driver.add(list(range(9)), tokens=1)
        assert shape(driver.turn()) == ([], [(again.id, 8, 1)])
        assert again.cached == 8
        assert (driver.scheduler.counters.prefix_queries, driver.scheduler.counters.prefix_hits) == (18, 8)

    def test_the_last_token_is_always_computed(self) -> None:
        driver = Driver()
        driver.add(list(range(8)), tokens=1)
        driver.finish()
        again = driver.add(list(range(8)), tokens=1)
        assert shape(driver.turn()) == ([], [(again.id, 4, 4)])

    def test_answers_are_prefixes_too(self) -> None:
        driver = Driver()
        first = driver.add(list(range(5)), tokens=8)
        driver.finish()
        second = driver.add([*first.tokens, 99], tokens=1)
        driver.turn()
        assert second.cached == 12

    def test_another_tenant_finds_nothing(self) -> None:
        driver = Driver()
        driver.add(list(range(9)), tokens=1, salt="a")
        driver.finish()
        driver.add(list(range(9)), tokens=1, salt="b")
        assert shape(driver.turn()) == ([], [(1, 0, 9)])

    def test_a_prefix_is_not_evicted_for_the_rest_of_the_very_sequence_that_found_it(self) -> None:
        driver = Driver(4)
        driver.add(list(range(9)), tokens=1)
        driver.finish()
        long = driver.add(list(range(16)), tokens=1)
        driver.turn()
        assert long.cached == 8 and len(set(long.blocks)) == 4

    def test_where_the_rest_does_not_fit_the_prefix_is_let_go(self) -> None:
        driver = Driver(6)
        driver.add(list(range(9)), tokens=1)
        driver.finish()
        driver.add([7] * 5, tokens=8)
        driver.turn()
        long = driver.add(list(range(20)), tokens=1)
        driver.turn()
        assert long.status is Status.WAITING and driver.pool.cached == 2 and driver.pool.available == 4
        driver.finish()
        assert len(long.output) == 1 and all_free(driver)


def raising(number: int) -> list[int]:
    """There are blocks, and none is to be had."""
    raise OutOfBlocks


class TestAllocationFailures:
    def test_an_admission_that_fails_halfway_takes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = Driver()
        sequence = driver.add(12, tokens=2)
        with monkeypatch.context() as patch:
            patch.setattr(driver.pool, "take", raising)
            assert driver.launch() is None
        assert driver.pool.available == 64 and sequence.blocks == []
        driver.finish()
        assert sequence.output == counted(sequence)

    def test_room_made_in_vain_moves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where even preempting all others gives no block, there is no step, and so nobody to copy blocks to the host."""
        driver = Driver(host_blocks=8)
        old, new = driver.add(4, tokens=3), driver.add(6, tokens=3)
        driver.turn()
        with monkeypatch.context() as patch:
            patch.setattr(driver.pool, "take", raising)
            assert driver.launch() is None
        assert new.status is Status.WAITING and host_free(driver)
        driver.finish()
        assert old.output == counted(old) and new.output == counted(new)


def test_who_has_ended_leaves_packed_tokens_in_the_prefix_cache() -> None:
    driver = Driver()
    sequence = driver.add(9, tokens=4)
    driver.finish()
    assert driver.pool.cached == 3 and isinstance(sequence.history._tokens, array)
    again = driver.add(sequence.tokens[:10], tokens=2)
    driver.finish()
    assert again.cached == 8 and isinstance(sequence.tokens, list)


class TestLookingAhead:
    def test_blocks_are_taken_for_many_rounds_at_once_and_the_device_is_told(self) -> None:
        driver = Driver(64, prefix_cache=False)
        family = [driver.add(1 + number, tokens=30) for number in range(4)]
        driver.turns(1 + 4 * AHEAD)
        assert [step.number for step in driver.steps if step.grown and step.number >= AHEAD] == [4, 8, 12, 16]
        told: dict[int, list[int]] = {}
        for step in driver.steps:
            for sequence, place in step.grown:
                told.setdefault(sequence.id, []).append(place)
        for sequence in family:
            assert told[sequence.id] == list(range(-(-sequence.prompt_length // SIZE), len(sequence.blocks)))
        driver.finish()
        assert all(one.output == counted(one) for one in family) and all_free(driver)

    def test_where_room_is_short_nobody_takes_a_block_before_it_is_needed(self) -> None:
        driver = Driver(7, prefix_cache=False)
        sequences = [driver.add(3, tokens=12), driver.add(3, tokens=12)]
        while driver.scheduler.has_work:
            driver.turn()
            if driver.pool.available < 2 * len(sequences):
                needed = [-(-one.computed // SIZE) for one in sequences]
                assert all(len(one.blocks) <= most + 1 for one, most in zip(sequences, needed, strict=True))
        assert driver.scheduler.counters.preemptions == 0 and all(one.output == counted(one) for one in sequences)


class TestAdmission:
    def test_tenants_take_turns_and_each_is_served_in_order(self) -> None:
        driver = Driver(max_seqs=1)
        salts = "aaabbc"
        family = [driver.add(2, tokens=1, salt=salt) for salt in salts]
        driver.finish()
        served = [work.sequence for step in driver.steps for work in step.chunks]
        assert [sequence.salt for sequence in served] == list("abcaba")
        assert [s for s in served if s.salt == "a"] == family[:3]

    def test_a_full_queue_refuses_and_says_when_to_come_back(self) -> None:
        driver = Driver(max_waiting=2)
        driver.add(3)
        with pytest.raises(QueueFull) as refusal:
            driver.answers_per_prompt(3, n=2)
        assert refusal.value.retry_after_s == 1.0 and "Ask again in 1 s." in refusal.value.words
        assert len(driver.scheduler.waiting) == 1

    def test_the_time_to_wait_follows_the_pace(self) -> None:
        driver = Driver(max_seqs=1, max_waiting=10)
        for _ in range(10):
            driver.add(2, tokens=1)
        for _ in range(8):
            driver.now_s += 1.0
            driver.turn()
        waiting = len(driver.scheduler.waiting)
        for _ in range(10 - waiting):
            driver.add(2)
        with pytest.raises(QueueFull) as refusal:
            driver.add(2)
        assert 2.0 < refusal.value.retry_after_s <= 20.0

    @pytest.mark.parametrize("jump_s", [-1e9, 0.0, 1e12, float("nan")])
    def test_a_clock_that_jumps_changes_no_more_than_that_time(self, jump_s: float) -> None:
        driver = Driver(max_waiting=2)
        family = [driver.add(2, tokens=2) for _ in range(2)]
        driver.turns(2)
        driver.now_s += jump_s
        driver.finish()
        assert all(sequence.output == counted(sequence) for sequence in family)
        with pytest.raises(QueueFull) as refusal:
            driver.answers_per_prompt(2, n=2) and driver.add(2)
        assert 1.0 <= refusal.value.retry_after_s <= 60.0

    @pytest.mark.parametrize(
        ("prompt", "tokens", "words"),
        [
            (0, 1, "has no tokens"),
            (32, 1, "The prompt has 32 tokens; the context is 32."),
            (8, 10, "8 tokens of prompt and 10 to generate; the whole cache holds 16."),
        ],
    )
    def test_what_can_never_run_is_refused(self, prompt: int, tokens: int, words: str) -> None:
        driver = Driver(4, context=32)
        with pytest.raises(NeverFits, match=words):
            driver.add([5] * prompt, tokens=tokens)
        assert not driver.scheduler.has_work

    def test_the_last_token_that_is_drawn_needs_no_room(self) -> None:
        driver = Driver(4)
        sequence = driver.add(8, tokens=9)
        driver.finish()
        assert sequence.output == counted(sequence)

    def test_more_draws_than_the_queue_ever_takes(self) -> None:
        with pytest.raises(NeverFits, match="5 answers to one prompt; the queue takes 4"):
            Driver(max_waiting=4).answers_per_prompt(3, n=5)

    def test_one_that_does_not_fit_is_not_overtaken(self) -> None:
        driver = Driver(8)
        driver.add(16, tokens=9)
        driver.turn()
        large, small = driver.add(20, tokens=4), driver.add(2, tokens=2)
        driver.turns(3)
        assert large.status is small.status is Status.WAITING
        driver.finish()
        assert large.rank < small.rank


REQUESTS = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 10), st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=8
)


@given(
    requests=REQUESTS,
    usable=st.integers(6, 12),
    max_seqs=st.integers(1, 4),
    batched_tokens=st.integers(1, 16),
    host_blocks=st.sampled_from([0, 3, 20]),
    prefix_cache=st.booleans(),
)
def test_everyone_gets_the_tokens_of_the_model_and_every_block_comes_back(
    requests: list[tuple[int, int, int, int]],
    usable: int,
    max_seqs: int,
    batched_tokens: int,
    host_blocks: int,
    prefix_cache: bool,
) -> None:
    driver = Driver(
        usable, prefix_cache=prefix_cache, max_seqs=max_seqs, batched_tokens=batched_tokens, host_blocks=host_blocks
    )
    everyone = []
    for prompt, tokens, n, pause in requests:
        everyone += driver.answers_per_prompt(prompt, tokens, n)
        driver.turns(pause)
    driver.finish()
    assert [sequence.output for sequence in everyone] == [counted(sequence) for sequence in everyone]
    assert {sequence.finish_reason for sequence in everyone} == {"length"}
    assert all_free(driver)

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from serve.driver import SIZE, Driver
from tonnage.serve.stats import KvLedger, kv_ledger

BLOCK_BYTES = 1000 * SIZE


def ledger(driver: Driver) -> KvLedger:
    return kv_ledger(driver.scheduler, BLOCK_BYTES)


def test_an_idle_cache_is_free_but_for_the_null_block() -> None:
    found = ledger(Driver(7))
    assert astuple(found) == (0, 0, 0, 0, BLOCK_BYTES, 7 * BLOCK_BYTES)
    assert found.total == 8 * BLOCK_BYTES


def test_a_sequence_uses_what_it_has_computed_and_the_rest_of_its_last_block_is_slack() -> None:
    driver = Driver(7)
    driver.add(6)
    driver.turn()
    found = ledger(driver)
    assert (found.used_bytes, found.slack_bytes, found.free_bytes) == (6000, 2000, 5 * BLOCK_BYTES)
    driver.turns(3)
    assert (ledger(driver).used_bytes, ledger(driver).slack_bytes) == (9000, 3000)


def test_blocks_of_a_prompt_whose_chunks_are_to_come_are_slack() -> None:
    driver = Driver(7, batched_tokens=5)
    driver.add(12)
    driver.turn()
    assert (ledger(driver).used_bytes, ledger(driver).slack_bytes) == (5000, 7000)


def test_what_draws_share_is_counted_once() -> None:
    driver = Driver(32)
    driver.answers_per_prompt(10, n=3)
    driver.turns(4)
    found = ledger(driver)
    assert found.shared_bytes == 2 * BLOCK_BYTES
    assert found.used_bytes + found.slack_bytes == sum(
        BLOCK_BYTES * (len(sequence.blocks) - 2) for sequence in driver.scheduler.running
    )


def test_full_blocks_stay_cached_and_the_others_are_free() -> None:
    driver = Driver(7)
    driver.add(6, tokens=4)
    driver.finish()
    # Nine tokens were computed: the last one drawn never is.
    assert ledger(driver).cached_bytes == 2 * BLOCK_BYTES
    assert ledger(driver).free_bytes == 5 * BLOCK_BYTES


@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3)), max_size=6),
    turns=st.integers(0, 40),
    host_blocks=st.sampled_from([0, 4]),
)
def test_the_parts_are_never_negative_and_always_the_whole(
    requests: list[tuple[int, int, int]], turns: int, host_blocks: int
) -> None:
    driver = Driver(8, host_blocks=host_blocks, batched_tokens=7)
    for prompt, tokens, n in requests:
        driver.answers_per_prompt(prompt, tokens, n)
    for _ in range(turns):
        driver.turn()
        found = ledger(driver)
        assert min(astuple(found)) >= 0
        assert found.total == 9 * BLOCK_BYTES
        computed = {
            (sequence.blocks[i // SIZE], i % SIZE)
            for sequence in driver.scheduler.running
            for i in range(sequence.computed)
        }
        assert found.used_bytes + found.shared_bytes == 1000 * len(computed)

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tonnage.integrations.steps import StepMemory, larger, steady_growth_bytes
from tonnage.ledger import Category, Ledger
from tonnage.units import GIB, MIB

LEVELS = st.lists(st.integers(0, 2**40), max_size=12)


def step(peak_bytes: int, leak_bytes: int = 0, leak_line: str = "") -> StepMemory:
    ledger = Ledger({Category.ACTIVATIONS: peak_bytes})
    return StepMemory(peak_bytes, 2 * peak_bytes, 0, ledger, leak_bytes, leak_line)


@given(levels=LEVELS)
def test_what_is_called_a_leak_was_left_by_every_one_of_the_last_steps(levels: list[int]) -> None:
    growth = steady_growth_bytes(levels)
    assert growth >= 0
    last = levels[-4:]
    if growth:
        assert len(last) == 4
        assert all(after >= before + growth for before, after in pairwise(last))


def test_a_cache_that_fills_once_is_no_leak() -> None:
    assert steady_growth_bytes([10, 20, 20, 20]) == 0
    assert steady_growth_bytes([10, 20, 30]) == 0
    assert steady_growth_bytes([10, 20, 30, 45]) == 10


def test_metrics_name_their_unit() -> None:
    assert step(2 * GIB, 3 * MIB).metrics() == {
        "memory/peak_allocated_gib": 2.0,
        "memory/peak_reserved_gib": 4.0,
        "memory/activations_gib": 2.0,
        "memory/leak_mib_per_step": 3.0,
    }


def test_a_leak_in_words() -> None:
    assert (
        step(1, 2 * MIB, "train.py:7").leak_words == "GPU memory grows by 2.00 MiB in every step, kept from train.py:7."
    )
    assert step(1, 2 * MIB).leak_words == "GPU memory grows by 2.00 MiB in every step."
    assert step(1).leak_words == ""


def test_the_higher_peak_is_kept_with_the_latest_leak() -> None:
    assert larger(None, step(5)) == step(5)
    assert larger(step(5), step(7)) == step(7)
    assert larger(step(7), step(5, 2, "a.py:1")) == step(7, 2, "a.py:1")

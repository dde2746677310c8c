from dataclasses import replace

import pytest

from support import Run, gone_on, training_run
from tonnage.explain import Advice, advice_for
from tonnage.explain.total import batch_of, largest_batch, total_of
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.recording.replay import demand, outcome_on


@pytest.fixture(scope="module")
def recording() -> Recording:
    return gone_on(batch=96, layers=12)


@pytest.fixture(scope="module")
def advice(recording: Recording) -> Advice:
    return advice_for(recording)


def test_a_run_that_fits_or_is_not_known_has_no_total() -> None:
    assert total_of(training_run()) is None
    assert total_of(training_run(batch=1024, layers=12)) is None


def test_the_batch_that_fits_is_the_largest_that_does(recording: Recording) -> None:
    needed = demand(recording)
    assert batch_of(needed) == 96
    batch = largest_batch(needed, 96)
    assert batch
    assert gone_on(batch=batch, layers=12).fits
    assert not gone_on(batch=batch + 1, layers=12).fits


def test_a_batch_that_inputs_do_not_agree_on_is_not_named(recording: Recording) -> None:
    needed = demand(recording)
    at_peak = next(a for a in needed.live_at_peak if a.category is Category.INPUTS)
    other = replace(at_peak, shape=(3, 7), index=10**6)
    assert batch_of(replace(needed, allocations=[*needed.allocations, other])) is None


def test_no_batch_is_named_where_none_fits() -> None:
    total = total_of(gone_on("1660", batch=32, layers=128))
    assert total and total.batch is None and total.of_batch is None


def test_a_check_mark_is_of_the_whole_run(recording: Recording, advice: Advice) -> None:
    """Expandable segments, or a little less, get past the line; the peak is two steps later."""
    assert advice.total
    for fix in advice.fixes:
        if fix.rescues:
            assert advice.total.peak_allocated_bytes - fix.saves_bytes < recording.header.capacity_bytes
    early = replace(recording, whole=None)
    gets_past = {fix.change for fix in advice_for(early).fixes if fix.rescues}
    assert {fix.change for fix in advice.fixes if fix.rescues} < gets_past


def test_the_larger_card_holds_the_whole_run(recording: Recording, advice: Advice) -> None:
    from tonnage.hardware import find_gpu

    assert advice.larger_card and advice.total
    card = find_gpu(advice.larger_card)
    assert outcome_on(recording, card).failed is None
    assert card.memory_bytes >= advice.total.needed_bytes


def test_a_limit_of_its_own_counts_as_the_card_s() -> None:
    """A process that may have 6 GiB of a card that would hold it: the batch that fits is one that its limit holds."""
    from tonnage.allocator import OutOfMemory
    from tonnage.recording.beyond import TO_ITS_END, parted

    run = Run("4090")
    run.allocator.set_memory_fraction(0.25)
    with pytest.raises(OutOfMemory) as refused:
        for _ in range(20):
            run.alloc(2**29, Category.ACTIVATIONS, shape=(8, 2**26), line="a.py:1")
    oom = run.dies(refused.value, line="a.py:1").oom
    since = run._next - 1
    run.recording.header.outcome = "ok"
    run.allocator.lift_limit()
    run.alloc(2**25, Category.INPUTS, shape=(8, 2**22))
    for _ in range(3):
        run.alloc(2**29, Category.ACTIVATIONS, shape=(8, 2**26), line="a.py:2")
    assert oom
    advice = advice_for(parted(run.recording, oom, since, TO_ITS_END))
    assert advice.total and advice.larger_card is None
    held = 11 * 2**29 + 3 * 2**29 + 2**25
    assert 6 * 2**30 < held < advice.total.needed_bytes < 8 * 2**30
    assert advice.total.of_batch == 8 and advice.total.batch in (5, 6)

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.clock.operators import OperatorCall, Work
from tonnage.hardware import find_gpu
from tonnage.roofline import Bound, analyse, catalogue_ceilings
from tonnage.roofline.analysis import NEAR, expected_s, judge
from tonnage.roofline.items import Item, RooflineProfile, gathered

H200 = catalogue_ceilings(find_gpu("h200"))


def profile(*items: Item) -> RooflineProfile:
    return RooflineProfile(kind="torch-profiler", source="by hand", items=items)


def product(name: str, rate: float, precision: str = "fp32", seconds: float = 1e-3) -> Item:
    return Item(name=name, seconds=seconds, work=Work(rate * seconds, 1e6, precision))


def test_rows_are_ordered_by_time_and_summed_by_class() -> None:
    slow, fast = product("slow", 5e13, seconds=2e-3), Item(name="fill_", seconds=1e-3, work=Work(0.0, 4.5e9))
    analysis = analyse(profile(fast, slow), H200)
    assert [row.item.name for row in analysis.rows] == ["slow", "fill_"]
    assert analysis.seconds_by_bound() == {Bound.COMPUTE: 2e-3, Bound.MEMORY: 1e-3}
    assert analysis.seconds == pytest.approx(3e-3)


def test_fp32_that_is_too_fast_for_fp32_was_tf32() -> None:
    above, below = analyse(profile(product("above", 3e14), product("below", 5e13)), H200).rows
    assert {above.item.name: above.item.work.precision, below.item.name: below.item.work.precision} == {
        "above": "tf32",
        "below": "fp32",
    }
    assert max(above.verdict.share, below.verdict.share) < 1


def test_plain_fp32_is_told_of_tf32() -> None:
    (row,) = analyse(profile(product("mm", 5e13)), H200).rows
    assert row.advice.startswith("plain FP32: TF32 allows 7 times")


def test_what_is_lost_is_what_the_bound_does_not_explain() -> None:
    (row,) = analyse(profile(Item(name="far", seconds=2e-3, work=Work(0.0, 2e12 * 2e-3))), H200).rows
    assert row.lost_s == pytest.approx(2e-3 * (1 - 2 / 4.8))


def test_the_host_s_share_is_a_launch_a_kernel() -> None:
    analysis = analyse(profile(product("a", 1e13), Item(name="b", seconds=1.0, launches=9, work=Work(1.0, 1.0))), H200)
    assert analysis.host_s == pytest.approx(10 * H200.launch_s)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (Item(name="a", seconds=1e-3, work=Work(0.0, 4.5e9)), "at the ceiling: move fewer bytes"),
        (Item(name="a", seconds=1e-3, work=Work(0.0, 2e9)), "short of the ceiling: contiguous"),
        (Item(name="a", seconds=1e-3, work=Work(0.0, 9e9)), "found part of its bytes in L2"),
        (Item(name="a", seconds=1e-3, work=Work(1.0, 1.0), on_chip_share=0.9), "lives in the caches"),
        (product("a", 8e14, "bf16"), "at the ceiling: only fewer operations"),
        (product("a", 5e14, "bf16"), "short of the ceiling: sizes"),
        (Item(name="a", seconds=1e-3, work=Work(None, 1.0), sm_share=0.9), "the SMs' pipes are busy"),
        (Item(name="a", seconds=2e-6, work=Work(1.0, 1.0)), "over before the card is full"),
        (Item(name="a", seconds=1e-3, work=Work(1.0, 1.0), blocks=32), "32 blocks for 132 SMs"),
        (Item(name="a", seconds=1e-3, work=Work(1.0, 1.0), blocks=3200), "neither ceiling explains"),
        (Item(name="a", seconds=1e-2, work=Work(None, 8e7), link="HtoD (Pageable"), "8.0 of 64 GB/s: pin_memory"),
        (Item(name="a", seconds=1e-5, work=Work(None, 4), link="DtoH (Device"), "a synchronising copy"),
        (Item(name="a", seconds=1e-5, work=Work(None, 4), link="HtoD (Pinned"), "small: send it with others"),
        (Item(name="a", seconds=1e-2, work=Work(None, None), unknown="no shapes"), "not judged: no shapes"),
    ],
)
def test_advice(item: Item, words: str) -> None:
    (row,) = analyse(profile(item), H200).rows
    assert words in row.advice


CARD, T4 = find_gpu("h200"), find_gpu("t4")
MM = OperatorCall(name="mm", shapes=((4096, 4096), (4096, 4096)), types=("c10::BFloat16",) * 2)


def item(call: OperatorCall = MM, seconds: float = 1e-3, **words: object) -> Item:
    work = Work(2.0 * 4096**3, 3.0 * 4096**2 * 2, "bf16")
    return Item(name=call.name, seconds=seconds, work=work, made=((call, 1),), **words)  # type: ignore[arg-type]


def test_a_product_takes_what_the_clock_says_and_longer_on_a_slower_card() -> None:
    ours, other = expected_s(item(), CARD), expected_s(item(), T4)
    assert ours is not None and other is not None
    assert 1.3e-4 < ours < 3e-4
    assert other > 5 * ours


def test_like_items_are_expected_together() -> None:
    (both,) = gathered([item(), item()])
    once, twice = expected_s(item(), CARD), expected_s(both, CARD)
    assert once is not None and twice == 2 * once


def test_a_copy_over_the_link_takes_the_link_s_time() -> None:
    copy = Item(name="copy", link="HtoD (Pinned -> Device)", seconds=1e-2, work=Work(None, 5e8))
    pageable = Item(name="copy", link="HtoD (Pageable -> Device)", seconds=1e-2, work=Work(None, 5e8))
    quick, slow = expected_s(copy, CARD), expected_s(pageable, CARD)
    assert quick is not None and slow is not None
    assert 0.008 < quick < slow


def test_what_nobody_knows_is_not_expected() -> None:
    assert expected_s(Item(name="mystery", seconds=1.0, work=Work(None, None)), CARD) is None
    odd = OperatorCall(name="mm", shapes=((2**47, 2**47), (2**47, 2**47)), types=("float",) * 2)
    assert expected_s(item(odd), CARD) is None or expected_s(item(odd), CARD) > 0


def test_slow_rows_come_by_the_time_beyond_what_is_expected() -> None:
    usual = expected_s(item(), CARD)
    assert usual is not None
    rows = [item(seconds=usual), item(seconds=2 * usual, detail="slow"), item(seconds=5 * usual, detail="slowest")]
    found = analyse(
        RooflineProfile(kind="torch-profiler", source="made up", items=tuple(rows)), catalogue_ceilings(CARD)
    )
    assert [row.item.detail for row in found.slow_rows()] == ["slowest", "slow"]
    measured_s, expected = found.expected
    assert measured_s == 8 * usual
    assert expected == 3 * usual


H200 = catalogue_ceilings(find_gpu("h200"))
BANDWIDTH, RATE = H200.memory_bytes_per_s, H200.rate("bf16")


def reaching(memory: float | None, compute: float | None, *, seconds: float = 1e-3, **more) -> Item:
    """One that reaches these shares of the two ceilings."""
    moved = None if memory is None else memory * seconds * BANDWIDTH
    operations = None if compute is None else compute * seconds * RATE
    return Item(name="kernel", seconds=seconds, work=Work(operations, moved, "bf16"), **more)


@pytest.mark.parametrize(
    ("asked", "bound", "because"),
    [
        (reaching(0.9, 0.1), Bound.MEMORY, "bytes"),
        (reaching(0.2, 0.8), Bound.COMPUTE, "operations"),
        (reaching(0.2, 0.1), Bound.LATENCY, "stalls"),
        (reaching(0.2, 0.1, blocks=8), Bound.LATENCY, "blocks"),
        (reaching(0.2, 0.1, seconds=3e-6), Bound.LATENCY, "launch"),
        (reaching(0.01, None, sm_share=0.9), Bound.COMPUTE, "pipes"),
        (reaching(0.5, 0.02, sm_share=0.7), Bound.COMPUTE, "pipes"),
        (reaching(None, 0.1, dram_share=0.8), Bound.MEMORY, "bytes"),
        (reaching(0.1, 0.1, on_chip_share=0.9), Bound.MEMORY, "caches"),
        (reaching(None, None), Bound.UNKNOWN, "unknown"),
        (reaching(None, None, seconds=1e-6), Bound.LATENCY, "launch"),
        (reaching(0.4, None), Bound.UNKNOWN, "unknown"),
        (reaching(0.7, None), Bound.MEMORY, "bytes"),
    ],
)
def test_classes(asked: Item, bound: Bound, because: str) -> None:
    verdict = judge(asked, H200)
    assert (verdict.bound, verdict.because) == (bound, because)


def test_a_busy_memory_pipe_does_not_make_a_matrix_product_memory_bound() -> None:
    """94 % of the memory pipe, 93 % of the SMs, 21 % of DRAM: what Nsight Compute says of a large product."""
    verdict = judge(reaching(0.21, None, sm_share=0.93, on_chip_share=0.94), H200)
    assert verdict.bound is Bound.COMPUTE and verdict.share == pytest.approx(0.93)


def test_parts_of_a_model_are_bound_by_what_takes_longer() -> None:
    moved, operations = 1e9, 1e9 * H200.ridge("bf16")
    part = Item(name="part", work=Work(operations * 0.9, moved, "bf16"))
    assert judge(part, H200).bound is Bound.MEMORY
    assert judge(replace(part, work=Work(operations * 1.1, moved, "bf16")), H200).bound is Bound.COMPUTE
    tiny = Item(name="part", launches=2, work=Work(10.0, 10.0))
    assert judge(tiny, H200).bound is Bound.LATENCY and judge(tiny, H200).bound_s == 2 * H200.kernel_floor_s


@pytest.mark.parametrize(
    ("link", "because"), [("HtoD (Pageable -> Device)", "pageable"), ("DtoH (Device -> Pinned)", "pinned")]
)
def test_copies_to_and_from_the_host_are_the_link_s(link: str, because: str) -> None:
    moved = H200.host_link_bytes_per_s / 4
    verdict = judge(Item(name="copy", seconds=1.0, work=Work(None, moved), link=link), H200)
    assert (verdict.bound, verdict.because, verdict.share) == (Bound.LINK, because, 0.25)


shares = st.one_of(st.none(), st.floats(0, 1.5))


@given(memory=shares, compute=shares, sm=shares, on_chip=shares, seconds=st.floats(1e-7, 10))
def test_a_verdict_holds_what_it_says(memory, compute, sm, on_chip, seconds) -> None:
    verdict = judge(reaching(memory, compute, seconds=seconds, sm_share=sm, on_chip_share=on_chip), H200)
    known = [share for share in (verdict.memory_share, verdict.compute_share) if share is not None]
    if verdict.bound in (Bound.MEMORY, Bound.COMPUTE) and verdict.because != "caches":
        assert verdict.share == max(known) >= NEAR
    if verdict.bound is Bound.LATENCY:
        assert max(known, default=0) < 0.6
    assert verdict.bound_s == pytest.approx(max(known, default=0) * seconds)


@given(factor=st.floats(0.01, 100))
def test_a_class_does_not_depend_on_the_size_of_the_work(factor: float) -> None:
    one = reaching(0.6, 0.5)
    work = Work(one.work.operations * factor, one.work.moved_bytes * factor, "bf16")
    assert judge(replace(one, seconds=one.seconds * factor, work=work), H200).bound is Bound.MEMORY


def test_a_part_that_waits_for_its_launch_does_not_claim_the_memory() -> None:
    verdict = judge(Item(name="part", launches=2, work=Work(10.0, 10.0)), H200)
    assert verdict.bound is Bound.LATENCY
    assert verdict.memory_share is not None and verdict.memory_share < NEAR

import pytest

from tonnage.clock.operators import OperatorCall
from tonnage.hardware import find_gpu
from tonnage.roofline import Bound, Item, RooflineProfile, Work, analyse, catalogue_ceilings
from tonnage.roofline.analysis import expected_s
from tonnage.roofline.items import gathered

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

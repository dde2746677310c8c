"""What the clock expects of an item."""

from tonnage.clock.operators import OperatorCall
from tonnage.clock.work import Work
from tonnage.hardware import find_gpu
from tonnage.roofline import catalogue_ceilings
from tonnage.roofline.analysis import analyse
from tonnage.roofline.expected import expected_s
from tonnage.roofline.items import Item, gathered
from tonnage.roofline.profile import RooflineProfile

H200, T4 = find_gpu("h200"), find_gpu("t4")
MM = OperatorCall(name="mm", shapes=((4096, 4096), (4096, 4096)), types=("c10::BFloat16",) * 2)


def item(call: OperatorCall = MM, seconds: float = 1e-3, **words: object) -> Item:
    work = Work(2.0 * 4096**3, 3.0 * 4096**2 * 2, "bf16")
    return Item(name=call.name, seconds=seconds, work=work, made=((call, 1),), **words)  # type: ignore[arg-type]


def test_a_product_takes_what_the_clock_says_and_longer_on_a_slower_card() -> None:
    ours, other = expected_s(item(), H200), expected_s(item(), T4)
    assert ours is not None and other is not None
    assert 1.3e-4 < ours < 3e-4
    assert other > 5 * ours


def test_like_items_are_expected_together() -> None:
    (both,) = gathered([item(), item()])
    once, twice = expected_s(item(), H200), expected_s(both, H200)
    assert once is not None and twice == 2 * once


def test_a_copy_over_the_link_takes_the_link_s_time() -> None:
    copy = Item(name="copy", link="HtoD (Pinned -> Device)", seconds=1e-2, work=Work(None, 5e8))
    pageable = Item(name="copy", link="HtoD (Pageable -> Device)", seconds=1e-2, work=Work(None, 5e8))
    quick, slow = expected_s(copy, H200), expected_s(pageable, H200)
    assert quick is not None and slow is not None
    assert 0.008 < quick < slow


def test_what_nobody_knows_is_not_expected() -> None:
    assert expected_s(Item(name="mystery", seconds=1.0, work=Work(None, None)), H200) is None
    odd = OperatorCall(name="mm", shapes=((2**47, 2**47), (2**47, 2**47)), types=("float",) * 2)
    assert expected_s(item(odd), H200) is None or expected_s(item(odd), H200) > 0


def test_slow_rows_come_by_the_time_beyond_what_is_expected() -> None:
    usual = expected_s(item(), H200)
    assert usual is not None
    rows = [item(seconds=usual), item(seconds=2 * usual, detail="slow"), item(seconds=5 * usual, detail="slowest")]
    found = analyse(
        RooflineProfile(kind="torch-profiler", source="made up", items=tuple(rows)), catalogue_ceilings(H200)
    )
    assert [row.item.detail for row in found.slow_rows()] == ["slowest", "slow"]
    measured_s, expected = found.expected
    assert measured_s == 8 * usual
    assert expected == 3 * usual

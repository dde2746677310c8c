import pytest

from tonnage.roofline import Item, Work
from tonnage.roofline.items import gathered


def kernel(name: str = "add", seconds: float = 1.0, **more) -> Item:
    return Item(name=name, seconds=seconds, work=Work(10.0, 100.0), **more)


def test_like_items_are_one() -> None:
    first, second = gathered([kernel(), kernel("mul"), kernel(seconds=3.0)])
    assert (first.name, first.calls, first.launches, first.seconds) == ("add", 2, 2, 4.0)
    assert first.work == Work(20.0, 200.0)
    assert second.calls == 1


def test_grids_of_another_size_are_another_item() -> None:
    assert len(gathered([kernel(blocks=1), kernel(blocks=262144)])) == 2


def test_shares_are_weighted_by_time() -> None:
    (item,) = gathered([kernel(seconds=1.0, sm_share=0.2), kernel(seconds=3.0, sm_share=0.6)])
    assert item.sm_share == pytest.approx(0.5)


def test_what_is_not_known_of_one_is_not_known_of_the_sum() -> None:
    unknown = Item(name="add", seconds=1.0, work=Work(None, None))
    (item,) = gathered([kernel(), unknown])
    assert item.work.operations is None and item.work.intensity is None


def test_intensity() -> None:
    assert Work(10.0, 100.0).intensity == 0.1
    assert Work(0.0, 100.0).intensity is None

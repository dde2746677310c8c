import gc
from collections.abc import Iterator

import pytest

from tonnage.garbage import made_own_objects, no_collection, watch_collections


class Cycle:
    """Only a collection frees it."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.freed += 1


@pytest.fixture
def watched() -> Iterator[int]:
    """The script's threshold, while its collections are watched."""
    threshold = gc.get_threshold()[0]
    stop = watch_collections()
    gc.collect()
    Cycle.freed = 0
    yield threshold
    stop()
    assert gc.get_threshold()[0] == threshold


def test_there_is_no_collection_inside_and_again_one_after() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_where_collection_was_off_it_stays_off() -> None:
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_of_ours_free_no_cycle_of_the_script(watched: int) -> None:
    Cycle()
    with no_collection():
        own = [[] for _ in range(2 * watched)]  # type: ignore[var-annotated]
    assert len(own) == 2 * watched
    its_own = [[] for _ in range(watched // 2)]  # type: ignore[var-annotated]
    assert len(its_own) == watched // 2
    assert Cycle.freed == 0


def test_kept_records_count_as_ours(watched: int) -> None:
    Cycle()
    records = []
    for _ in range(2 * watched):
        records.append([])  # type: ignore[var-annotated]
        made_own_objects(1)
    assert Cycle.freed == 0
    assert len(records) == 2 * watched


def test_the_script_s_own_objects_bring_a_collection_as_ever(watched: int) -> None:
    Cycle()
    with no_collection():
        own = [[] for _ in range(2 * watched)]  # type: ignore[var-annotated]
    its_own = [[] for _ in range(2 * watched)]  # type: ignore[var-annotated]
    assert len(own) == len(its_own)
    assert Cycle.freed == 1


def test_a_threshold_that_the_script_sets_is_kept(watched: int) -> None:
    gc.set_threshold(5000)
    try:
        made_own_objects(1)
        gc.collect()
        assert gc.get_threshold()[0] == 5000
        gc.set_threshold(0)
        made_own_objects(1)
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(watched)
        gc.collect()

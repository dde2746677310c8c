import gc

from tonnage.garbage import no_collection


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

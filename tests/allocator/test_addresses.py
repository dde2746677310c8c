"""Addresses: placed from the top down in ranges of 32 MiB, never twice at once."""

from hypothesis import given
from hypothesis import strategies as st

from tonnage.allocator.addresses import RANGE_BYTES, TOP, AddressSpace

MIB = 2**20


def test_ranges_grow_downwards() -> None:
    space = AddressSpace()
    assert [space.take(20 * MIB), space.take(40 * MIB)] == [TOP - 32 * MIB, TOP - 96 * MIB]


def test_the_newest_range_with_room_serves_first() -> None:
    space = AddressSpace()
    first, second = space.take(18 * MIB), space.take(20 * MIB)
    assert space.take(2 * MIB) == second + 20 * MIB
    assert space.take(14 * MIB) == first + 18 * MIB


def test_an_empty_range_is_given_up_and_its_place_taken_again() -> None:
    space = AddressSpace()
    kept, gone = space.take(32 * MIB), space.take(64 * MIB)
    space.give_back(gone, 64 * MIB)
    assert space.take(32 * MIB) == kept - 32 * MIB


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=60))
def test_no_two_stretches_overlap(steps: list[tuple[int, bool]]) -> None:
    space, taken = AddressSpace(), {}
    for units, frees in steps:
        if frees and taken:
            address = next(iter(taken))
            space.give_back(address, taken.pop(address))
        address = space.take(units * 2 * MIB)
        assert all(address + units * 2 * MIB <= start or start + size <= address for start, size in taken.items())
        taken[address] = units * 2 * MIB


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_all_given_back_is_as_new(units: list[int]) -> None:
    space = AddressSpace()
    for address, size in [(space.take(n * 2 * MIB), n * 2 * MIB) for n in units]:
        space.give_back(address, size)
    assert space.take(RANGE_BYTES) == TOP - RANGE_BYTES

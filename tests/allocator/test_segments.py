"""Addresses from the top down, garbage collection, and the release of blocks above the split limit."""

from hypothesis import given
from hypothesis import strategies as st

from tonnage.allocator import AllocatorSettings, CachingAllocator
from tonnage.allocator.segments import RANGE_BYTES, TOP, AddressSpace

MIB = 2**20


def collecting(fraction: float = 0.5) -> CachingAllocator:
    allocator = CachingAllocator(1000 * MIB, AllocatorSettings.parse("garbage_collection_threshold:0.5"))
    allocator.set_memory_fraction(fraction)
    return allocator


def test_old_segments_go_before_young_ones() -> None:
    allocator = collecting()
    old, young = allocator.malloc(100 * MIB), allocator.malloc(120 * MIB)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.malloc(60 * MIB, stream=1))
    allocator.free(young)
    allocator.malloc(200 * MIB)
    sizes = {segment["total_size"] // MIB for segment in allocator.snapshot()}
    assert 100 not in sizes
    assert 120 in sizes
    assert allocator.memory_stats()["num_alloc_retries"] == 0


def test_nothing_is_collected_below_the_threshold_or_without_a_fraction() -> None:
    for fraction in (1.0, 0.9):
        allocator = collecting(fraction)
        allocator.free(allocator.malloc(100 * MIB))
        allocator.malloc(200 * MIB)
        assert allocator.memory_stats()["segment.all.freed"] == 0


def test_split_segments_are_not_collected() -> None:
    allocator = collecting()
    kept = [allocator.malloc(2 * MIB)]
    allocator.free(allocator.malloc(17 * MIB))
    allocator.malloc(300 * MIB)
    allocator.malloc(100 * MIB)
    assert len(kept) == 1
    assert 20 in {segment["total_size"] // MIB for segment in allocator.snapshot()}


def oversized(capacity: int) -> CachingAllocator:
    return CachingAllocator(capacity * MIB, AllocatorSettings.parse("max_split_size_mb:50"))


def test_one_oversize_block_that_is_large_enough_goes_alone() -> None:
    allocator = oversized(300)
    for block in [allocator.malloc(size * MIB) for size in (60, 100, 130)]:
        allocator.free(block)
    allocator.malloc(40 * MIB)
    assert sorted(segment["total_size"] // MIB for segment in allocator.snapshot()) == [40, 100, 130]
    assert allocator.memory_stats()["num_alloc_retries"] == 0


def test_else_several_go_from_the_largest_down() -> None:
    allocator = oversized(300)
    for block in [allocator.malloc(size * MIB) for size in (60, 100, 130)]:
        allocator.free(block)
    allocator.malloc(200 * MIB)
    assert sorted(segment["total_size"] // MIB for segment in allocator.snapshot()) == [60, 200]


def test_what_oversize_blocks_cannot_give_the_whole_cache_gives() -> None:
    allocator = oversized(300)
    for block in [allocator.malloc(size * MIB) for size in (30, 40, 100)]:
        allocator.free(block)
    allocator.malloc(250 * MIB)
    assert allocator.memory_stats()["num_alloc_retries"] == 1


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

"""Garbage collection, and the release of blocks above the split limit."""

from tonnage.allocator import AllocatorSettings, CachingAllocator

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

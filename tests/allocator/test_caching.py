"""The caching allocator: what it takes, splits, merges and gives back."""

import pytest

from tonnage.allocator import AllocatorSettings, CachingAllocator

MIB = 2**20


@pytest.fixture
def allocator() -> CachingAllocator:
    return CachingAllocator(1000 * MIB)


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
        (21 * MIB - 1, 21 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(request_bytes: int, block: int, segment: int) -> None:
    allocator = CachingAllocator(1000 * MIB)
    got = allocator.malloc(request_bytes)
    stats = allocator.memory_stats()
    # A remainder of up to 1 MiB of a large segment stays with the block.
    expected = segment if segment - block <= MIB and request_bytes > MIB else block
    assert got.size == stats["allocated_bytes.all.current"] == expected
    assert stats["requested_bytes.all.current"] == got.requested_bytes == request_bytes
    assert stats["reserved_bytes.all.current"] == segment


def test_best_fit_takes_the_smallest_and_then_the_lowest(allocator: CachingAllocator) -> None:
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 30, 50)]
    for block in blocks:
        allocator.free(block)
    lowest = min(blocks[1].address, blocks[2].address)
    assert allocator.malloc(29 * MIB).address == lowest


def test_streams_do_not_share(allocator: CachingAllocator) -> None:
    block = allocator.malloc(30 * MIB, stream=1)
    address = block.address
    allocator.free(block)
    assert allocator.malloc(30 * MIB, stream=2).address != address
    assert allocator.malloc(30 * MIB, stream=1).address == address


def test_neighbours_merge(allocator: CachingAllocator) -> None:
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[3], blocks[1]):
        allocator.free(block)
    (segment,) = allocator.snapshot()
    assert [block["size"] for block in segment["blocks"]] == [20 * MIB]
    assert allocator.memory_stats()["inactive_split.all.current"] == 0
    assert allocator.memory_stats()["inactive_split.all.peak"] == 2


def test_a_block_cannot_be_freed_twice(allocator: CachingAllocator) -> None:
    block = allocator.malloc(512)
    allocator.free(block)
    with pytest.raises(AssertionError, match="is not allocated"):
        allocator.free(block)


def test_empty_cache_keeps_split_segments(allocator: CachingAllocator) -> None:
    kept, gone = allocator.malloc(5 * MIB), allocator.malloc(30 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    stats = allocator.memory_stats()
    assert stats["reserved_bytes.all.current"] == stats["segment.all.current"] == 0
    assert stats["num_device_free"] == stats["num_sync_all_streams"] == 2


def test_peaks_and_totals_start_over(allocator: CachingAllocator) -> None:
    first, second = allocator.malloc(30 * MIB), allocator.malloc(512)
    allocator.free(first)
    allocator.reset_peak()
    allocator.reset_accumulated()
    allocator.free(second)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["active_bytes.all.peak"] == 512
    assert stats["allocated_bytes.large_pool.peak"] == 0
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (0, 1)
    assert stats["num_device_alloc"] == 0


def test_max_split_size_keeps_large_blocks_whole() -> None:
    allocator = CachingAllocator(1000 * MIB, AllocatorSettings.parse("max_split_size_mb:50"))
    large = allocator.malloc(100 * MIB)
    allocator.free(large)
    assert allocator.malloc(30 * MIB).size == 30 * MIB, "a request below the limit does not take a block above it"
    assert allocator.malloc(70 * MIB).size == 70 * MIB, "nor does one that wants 30 MiB less"
    assert allocator.malloc(90 * MIB).size == 100 * MIB, "within 20 MiB it takes the block, and all of it"
    stats = allocator.memory_stats()
    assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 2
    assert stats["max_split_size"] == 50 * MIB


def test_rounding_to_divisions() -> None:
    allocator = CachingAllocator(1000 * MIB, AllocatorSettings.parse("roundup_power2_divisions:4"))
    assert allocator.malloc(33 * MIB).size == 40 * MIB


def test_expandable_segments_grow_by_pages_and_split_anywhere() -> None:
    events: list[tuple[str, int, int, int]] = []
    settings = AllocatorSettings(expandable_segments=True)
    allocator = CachingAllocator(1000 * MIB, settings, observer=lambda *event: events.append(event))
    first, second = allocator.malloc(25 * MIB), allocator.malloc(10 * MIB)
    assert [(action, size) for action, _, size, _ in events] == [("segment_map", 40 * MIB)]
    assert (first.size, second.address) == (25 * MIB, first.address + 25 * MIB)
    allocator.malloc(6 * MIB)
    assert events[-1] == ("segment_map", first.address + 40 * MIB, 20 * MIB, 0)
    assert allocator.memory_stats()["segment.all.current"] == 0
    assert allocator.memory_stats()["inactive_split.all.peak"] == 0


def test_expandable_pages_are_unmapped_and_filled_again() -> None:
    settings = AllocatorSettings(expandable_segments=True)
    allocator = CachingAllocator(1000 * MIB, settings)
    first, kept = allocator.malloc(100 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 20 * MIB
    again = allocator.malloc(60 * MIB)
    assert again.address < kept.address, "the lowest room is used first"
    allocator.free(again)
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.snapshot() == []


def test_settings_may_change_in_mid_run() -> None:
    allocator = CachingAllocator(1000 * MIB, AllocatorSettings(expandable_segments=True))
    grown = allocator.malloc(30 * MIB)
    allocator.free(grown)
    allocator.settings = allocator.settings.changed_by("expandable_segments:False")
    fixed = allocator.malloc(30 * MIB)
    assert fixed.segment is None
    allocator.free(fixed)
    allocator.settings = allocator.settings.changed_by("expandable_segments:True")
    assert allocator.memory_stats()["reserved_bytes.all.current"] == (40 + 30) * MIB
    assert allocator.malloc(30 * MIB).address == fixed.address


def test_a_private_pool_keeps_its_memory_until_it_is_released(allocator: CachingAllocator) -> None:
    pool = (0, 7)
    allocator.begin_allocate_to_pool(pool)
    inside = allocator.malloc(30 * MIB)
    allocator.end_allocate_to_pool(pool)
    outside = allocator.malloc(30 * MIB)
    allocator.free(inside)
    assert allocator.malloc(30 * MIB).address not in (inside.address, outside.address)
    allocator.empty_cache()
    assert allocator.memory_stats()["segment.all.current"] == 3
    assert [segment["segment_pool_id"] for segment in allocator.snapshot()].count(pool) == 1
    allocator.release_pool(pool)
    assert allocator.pool_use_count(pool) == 0
    allocator.empty_cache()
    assert allocator.memory_stats()["segment.all.current"] == 2


def test_a_private_pool_may_accept_some_streams_only(allocator: CachingAllocator) -> None:
    allocator.begin_allocate_to_pool((0, 1), accepts=lambda stream: stream == 5)
    inside, outside = allocator.malloc(512, stream=5), allocator.malloc(512, stream=0)
    assert inside.pool.owner is not None
    assert outside.pool.owner is None


def test_snapshot_describes_blocks(allocator: CachingAllocator) -> None:
    kept, gone = allocator.malloc(3000), allocator.malloc(5000)
    allocator.record_stream(gone.address, 9)
    allocator.free(gone)
    (segment,) = allocator.snapshot()
    assert {key: segment[key] for key in ("total_size", "allocated_size", "active_size", "requested_size")} == {
        "total_size": 2 * MIB,
        "allocated_size": 3072,
        "active_size": 3072 + 5120,
        "requested_size": 8000,
    }
    assert (segment["segment_type"], segment["stream"], segment["is_expandable"]) == ("small", 0, False)
    states = [block["state"] for block in segment["blocks"]]
    assert states == ["active_allocated", "active_pending_free", "inactive"]
    assert segment["blocks"][0]["address"] == segment["address"] == kept.address

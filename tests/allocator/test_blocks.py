"""Blocks that other streams use: freed at once, reused later."""

from tonnage.allocator import CachingAllocator

MIB = 2**20


def recorded(allocator: CachingAllocator, *streams: int):
    block = allocator.malloc(30 * MIB)
    for stream in streams:
        allocator.record_stream(block.address, stream)
    return block


def test_a_recorded_block_waits_for_every_stream() -> None:
    allocator = CachingAllocator(1000 * MIB)
    block = recorded(allocator, 1, 2)
    allocator.free(block)
    stats = allocator.memory_stats()
    assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]) == (0, 30 * MIB)
    allocator.process_events(1)
    assert allocator.memory_stats()["active_bytes.all.current"] == 30 * MIB
    allocator.process_events(2)
    assert allocator.memory_stats()["active_bytes.all.current"] == 0
    assert allocator.malloc(30 * MIB).address == block.address


def test_its_own_stream_needs_no_waiting() -> None:
    allocator = CachingAllocator(1000 * MIB)
    allocator.free(recorded(allocator, 0))
    assert allocator.memory_stats()["active_bytes.all.current"] == 0


def test_active_bytes_peak_above_allocated_bytes() -> None:
    allocator = CachingAllocator(1000 * MIB)
    for _ in range(3):
        allocator.free(recorded(allocator, 1))
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == 30 * MIB
    assert stats["active_bytes.all.peak"] == stats["reserved_bytes.all.peak"] == 90 * MIB
    assert stats["active.large_pool.peak"] == 3


def test_emptying_the_cache_synchronises() -> None:
    allocator = CachingAllocator(1000 * MIB)
    allocator.free(recorded(allocator, 1))
    allocator.empty_cache()
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 0


def test_a_capture_defers_and_forgives_its_own_streams() -> None:
    allocator = CachingAllocator(1000 * MIB)
    before = recorded(allocator, 1)
    allocator.begin_allocate_to_pool((0, 1))
    within = recorded(allocator, 2)
    allocator.free(before)
    allocator.free(within)
    allocator.process_events()
    assert allocator.memory_stats()["active_bytes.all.current"] == 60 * MIB
    allocator.end_allocate_to_pool((0, 1))
    allocator.process_events(99)
    assert allocator.memory_stats()["active_bytes.all.current"] == 30 * MIB, "only the use before the capture waits"
    allocator.process_events(1)
    assert allocator.memory_stats()["active_bytes.all.current"] == 0


def test_a_pool_of_its_own_is_synchronised_alone() -> None:
    allocator = CachingAllocator(1000 * MIB)
    outside = recorded(allocator, 1)
    allocator.begin_allocate_to_pool((0, 1))
    inside = allocator.malloc(30 * MIB)
    allocator.end_allocate_to_pool((0, 1))
    allocator.record_stream(inside.address, 1)
    for block in (outside, inside):
        allocator.free(block)
    allocator.release_pool((0, 1))
    allocator.empty_cache((0, 1))
    assert allocator.memory_stats()["active_bytes.all.current"] == 30 * MIB
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 30 * MIB

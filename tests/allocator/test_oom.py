"""Out of memory: PyTorch's own words, and the path that leads there."""

import pytest

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from tonnage.allocator.oom import Shortage, format_size

MIB, GIB = 2**20, 2**30

# As torch 2.11 put it on an H200, for mlp_train.py with a memory fraction of 0.2.
H200_MESSAGE = (
    "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 112.10 GiB "
    "is free. Including non-PyTorch memory, this process has 27.69 GiB memory in use. 27.96 GiB allowed; Of the "
    "allocated memory 27.03 GiB is allocated by PyTorch, and 223.50 KiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def test_the_message_is_pytorchs() -> None:
    shortage = Shortage(
        device=0,
        requested_bytes=GIB,
        segment_bytes=GIB,
        capacity_bytes=150_109_880_320,
        free_bytes=120_366_000_000,
        allowed_bytes=int(0.2 * 150_109_880_320),
        process_bytes=29_735_518_208,
        allocated_bytes=29_026_680_832 - 228_864,
        reserved_bytes=29_026_680_832,
        private_pool_bytes=0,
    )
    assert OutOfMemory(shortage).message == H200_MESSAGE


def test_private_pools_are_named() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.begin_allocate_to_pool((0, 1))
    allocator.free(allocator.malloc(20 * MIB))
    allocator.end_allocate_to_pool((0, 1))
    with pytest.raises(OutOfMemory, match=r"with 20\.00 MiB allocated in private pools") as caught:
        allocator.malloc(30 * MIB)
    assert caught.value.shortage.reserved_unallocated_bytes == 0


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (GIB, "1024.00 MiB"),
        (GIB + 1, "1.00 GiB"),
    ],
)
def test_sizes_as_pytorch_prints_them(size: int, words: str) -> None:
    assert format_size(size) == words


def test_a_full_device_is_retried_with_an_empty_cache() -> None:
    events: list[str] = []
    allocator = CachingAllocator(100 * MIB, observer=lambda action, *_: events.append(action))
    allocator.free(allocator.malloc(60 * MIB))
    block = allocator.malloc(80 * MIB)
    assert block.size == 80 * MIB
    assert events == ["segment_alloc", "segment_free", "segment_alloc"]
    assert allocator.memory_stats()["num_alloc_retries"] == 1
    assert allocator.memory_stats()["num_ooms"] == 0


def test_out_of_memory_carries_its_numbers_and_leaves_the_allocator_usable() -> None:
    events: list[tuple[str, int, int, int]] = []
    allocator = CachingAllocator(102 * MIB, outside_bytes=10 * MIB, observer=lambda *event: events.append(event))
    kept = allocator.malloc(60 * MIB, stream=3)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(40 * MIB - 100, stream=3)
    shortage = caught.value.shortage
    assert (shortage.requested_bytes, shortage.segment_bytes) == (40 * MIB - 100, 40 * MIB)
    assert (shortage.free_bytes, shortage.process_bytes) == (32 * MIB, 70 * MIB)
    assert (shortage.allocated_bytes, shortage.reserved_bytes) == (60 * MIB, 60 * MIB)
    assert caught.value.exit_code == 1
    assert events[-1] == ("oom", 32 * MIB, 40 * MIB, 3)
    assert allocator.memory_stats()["num_ooms"] == 1
    allocator.free(kept)
    assert allocator.malloc(90 * MIB).size == 90 * MIB


def test_outside_bytes_may_grow() -> None:
    allocator = CachingAllocator(100 * MIB)
    assert allocator.free_bytes == 100 * MIB
    allocator.outside_bytes = 50 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB)
    assert allocator.malloc(40 * MIB).size == 40 * MIB
    assert allocator.free_bytes == 10 * MIB


def test_the_last_page_of_a_device_cannot_be_had() -> None:
    allocator = CachingAllocator(100 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(100 * MIB)
    assert allocator.malloc(98 * MIB).size == 98 * MIB


def test_a_fraction_limits_reserved_bytes_below_the_device() -> None:
    allocator = CachingAllocator(1000 * MIB)
    allocator.set_memory_fraction(0.1)
    with pytest.raises(OutOfMemory, match=r"100\.00 MiB allowed; Of the allocated"):
        allocator.malloc(102 * MIB)
    assert allocator.malloc(100 * MIB).size == 100 * MIB
    allocator.set_memory_fraction(1)
    assert allocator.malloc(100 * MIB).size == 100 * MIB


def test_a_fraction_is_between_zero_and_one() -> None:
    with pytest.raises(ValueError, match=r"invalid fraction:1\.5"):
        CachingAllocator(MIB).set_memory_fraction(1.5)


def in_halves(text: str) -> CachingAllocator:
    """A device of which every other half is free."""
    allocator = CachingAllocator(402 * MIB, AllocatorSettings.parse(text))
    pairs = [(allocator.malloc(60 * MIB), allocator.malloc(40 * MIB)) for _ in range(4)]
    for first, _ in pairs:
        allocator.free(first)
    return allocator


def test_expandable_segments_use_what_fragmentation_would_waste() -> None:
    assert in_halves("expandable_segments:True").malloc(160 * MIB).size == 160 * MIB
    with pytest.raises(OutOfMemory) as caught:
        CachingAllocator(402 * MIB).malloc(402 * MIB)
    assert caught.value.shortage.reserved_unallocated_bytes == 0


def test_memory_that_is_free_in_pieces_is_no_help_in_default_mode() -> None:
    allocator = CachingAllocator(102 * MIB)
    whole = allocator.malloc(100 * MIB)
    allocator.free(whole)
    kept = [allocator.malloc(30 * MIB) for _ in range(3)]
    allocator.free(kept[0])
    allocator.free(kept[2])
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(60 * MIB)
    assert caught.value.shortage.reserved_unallocated_bytes == 70 * MIB

import pytest

from tonnage.errors import RequestError
from tonnage.explain.text import read_numbers
from tonnage.units import GIB, MIB

OLD = "CUDA out of memory. Tried to allocate 352.00 MiB (GPU 1; 7.92 GiB total capacity; 1.67 GiB already allocated; "
NEW = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 5.75 MiB is free. "
ALLOCATED = (
    "Of the allocated memory 22.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def test_cached_is_what_is_not_allocated_and_reserved_is_all() -> None:
    first = read_numbers(OLD + "156.00 MiB free; 124.00 MiB cached)")
    second = read_numbers(OLD + "156.00 MiB free; 1.79 GiB reserved in total by PyTorch)")
    assert first and second
    assert first.wording == "PyTorch 1.0 to 1.3" and second.wording == "PyTorch 1.4 to 2.0"
    assert first.unallocated == 124 * MIB and first.device == 1
    assert second.unallocated == pytest.approx(0.12 * GIB, rel=1e-6)
    assert second.slack("unallocated") == pytest.approx(0.01 * GIB, rel=1e-3)


def test_newer_messages_list_processes_and_a_limit() -> None:
    others = "Process 12 has 1.50 GiB memory in use. Process 13 has 512.00 MiB memory in use. "
    this = "Including non-PyTorch memory, this process has 22.90 GiB memory in use. 20.00 GiB allowed; "
    numbers = read_numbers(NEW + others + this + ALLOCATED)
    assert numbers and numbers.others == (1536 * MIB, 512 * MIB)
    assert numbers.process == int(22.9 * GIB) and numbers.allowed == 20 * GIB
    assert numbers.reserved == 22 * GIB + 512 * MIB and not numbers.is_process_inferred


def test_in_a_container_this_process_is_the_one_that_holds_what_pytorch_does() -> None:
    numbers = read_numbers(
        NEW + "Process 9 has 300.00 MiB memory in use. Process 10 has 23.10 GiB memory in use. " + ALLOCATED
    )
    assert numbers and numbers.is_process_inferred
    assert numbers.process == int(23.1 * GIB) and numbers.others == (300 * MIB,)


def test_counters_that_nobody_set_are_not_numbers() -> None:
    this = "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. "
    numbers = read_numbers(NEW + this + ALLOCATED)
    assert numbers and numbers.process is None


@pytest.mark.parametrize("device", ["CUDA", "HIP", "XPU"])
def test_other_devices_speak_alike(device: str) -> None:
    numbers = read_numbers(NEW.replace("CUDA", device) + ALLOCATED)
    assert numbers and numbers.asked == 20 * MIB and numbers.allocated == 22 * GIB


def test_apple_and_cuda_malloc_async() -> None:
    apple = read_numbers(
        "MPS backend out of memory (MPS allocated: 15.72 GB, other allocations: 2.41 MB, max allowed: 18.13 GB). "
        "Tried to allocate 5.81 GB on private pool."
    )
    assert apple and apple.wording == "PyTorch on MPS"
    assert apple.asked == int(5.81 * GIB) and apple.allowed == int(18.13 * GIB) and apple.elsewhere == int(2.41 * MIB)
    own = read_numbers(
        "Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : 23.05 GiB Requested : "
        "25.00 MiB Device limit : 23.99 GiB Free (according to CUDA): 0 bytes PyTorch limit (set by user-supplied memory "
        "fraction) : 17179869184.00 GiB"
    )
    assert own and own.wording == "PyTorch with cudaMallocAsync" and own.allowed is None and own.free == 0


def test_a_message_that_was_cut_short_is_read_as_far_as_it_goes() -> None:
    numbers = read_numbers("CUDA out of memory. Tried to allocate 218.96 GiB")
    assert numbers and numbers.total is None and numbers.asked == int(218.96 * GIB)
    assert read_numbers("CUDA out of memory. Tried to") is None


def test_windows_lends_memory_beyond_the_card() -> None:
    numbers = read_numbers(
        "Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; "
        "19.15 GiB reserved in total by PyTorch)"
    )
    assert numbers and numbers.own and numbers.total and numbers.own > numbers.total


@pytest.mark.parametrize(
    "nonsense",
    [
        "Tried to allocate -5.00 MiB",
        "Tried to allocate 1.00 MiB (GPU 0; 1.00 GiB total capacity; 0 bytes already allocated; 9.00 GiB free;",
        "Tried to allocate 99999999999999999999999999.00 GiB",
        "Tried to allocate 1.00 MiB (GPU 0; 0 bytes total capacity;",
    ],
)
def test_numbers_that_no_device_says_are_refused(nonsense: str) -> None:
    with pytest.raises(RequestError, match=r"below zero|make no sense"):
        read_numbers(nonsense)

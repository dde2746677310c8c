"""Copies back to the card: what is dropped while one may run is not reused, and is once it is done."""

import torch

from tonnage.virtual.cluster.copies import CopiesBack
from tonnage.virtual.modelled import ModelledSession as Session

LARGE = 1 << 28


def reserved_bytes() -> int:
    return torch.cuda.memory_reserved()


def test_what_is_dropped_during_its_copy_is_reused_after_a_later_collective(gpu: Session) -> None:
    copies = CopiesBack(gpu.device)
    first = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    copy, later = copies.begin([first]), copies.begin([torch.empty(8, device="cuda")])
    copy()
    allocated, reserved = torch.cuda.memory_allocated(), reserved_bytes()
    del first
    assert torch.cuda.memory_allocated() == allocated - LARGE
    second = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    assert reserved_bytes() == reserved + LARGE
    later()
    third = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    assert reserved_bytes() == reserved + LARGE
    assert second.data_ptr() != third.data_ptr()


def test_a_copy_is_done_after_as_many_requests_as_its_bytes_take(gpu: Session) -> None:
    copies = CopiesBack(gpu.device)
    block = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    copies.begin([block])()
    reserved = reserved_bytes()
    address = block.data_ptr()
    del block
    for _ in range(1000):
        torch.empty(8, device="cuda")
    again = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    assert (again.data_ptr(), reserved_bytes()) == (address, reserved)


def test_what_lives_on_after_its_copy_is_reused_at_once(gpu: Session) -> None:
    copies = CopiesBack(gpu.device)
    block = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    copies.begin([block])()
    copies.begin([torch.empty(8, device="cuda")])()
    reserved, address = reserved_bytes(), block.data_ptr()
    del block
    again = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    assert (again.data_ptr(), reserved_bytes()) == (address, reserved)

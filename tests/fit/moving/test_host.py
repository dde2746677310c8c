"""Pinned buffers of exact size, and what the host has left."""

import gc

import pytest
import torch

from tonnage.fit.moving.host import CopyLane, HostMemoryExhausted, PinnedPool, host_limit_bytes, pinned
from tonnage.units import KIB

CPU = torch.device("cpu")


def test_a_buffer_has_its_size_and_begins_on_a_page() -> None:
    buffer = pinned(5001, CPU)
    assert buffer.numel() == 5001
    assert buffer.data_ptr() % 4096 == 0
    assert pinned(0, CPU).numel() == 0


def test_a_view_keeps_the_pages() -> None:
    view = pinned(8 * KIB, CPU)[KIB:]
    gc.collect()
    view.fill_(3)
    assert int(view.sum()) == 3 * 7 * KIB


def test_buffers_of_the_same_size_are_used_again() -> None:
    pool = PinnedPool(CPU, 2 * KIB)
    first = pool.take(KIB)
    address = first.data_ptr()
    pool.give(first)
    assert pool.take(KIB).data_ptr() == address
    assert pool.pinned_bytes == KIB


def test_unused_buffers_of_other_sizes_make_room_and_no_more_is_granted() -> None:
    pool = PinnedPool(CPU, 2 * KIB)
    pool.give(pool.take(KIB))
    held = pool.take(2 * KIB)
    assert pool.pinned_bytes == held.numel()
    with pytest.raises(HostMemoryExhausted, match=r"2\.00 KiB of the 2\.00 KiB granted"):
        pool.take(1)


def test_without_streams_a_copy_is_done_at_once() -> None:
    target = torch.zeros(4)
    ticket = CopyLane(CPU).copy(torch.ones(4), target)
    assert target.tolist() == [1] * 4
    ticket.wait()
    ticket.done()


def test_what_was_asked_for_goes_before_what_is_free() -> None:
    assert host_limit_bytes(CPU, 5) == 5
    assert host_limit_bytes(CPU, None) > 0

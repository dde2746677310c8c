"""A rank's side of its groups: staging of backends, copies back to the card, and collectives as they are told to step
capture.
"""

import pytest
import torch

from tonnage.script import profiler
from tonnage.virtual.cluster.exchange import OwnExchange, ProcessGroup
from tonnage.virtual.cluster.groups import VirtualGroup
from tonnage.virtual.cluster.member import CopiesBack, DoneWork, Member, flat_tensor, is_gloo
from tonnage.virtual.modelled import ModelledSession as Session

WORLD, HALF = ProcessGroup(tuple(range(8)), 0, 0, "nccl"), ProcessGroup((1, 3, 5, 7), 0, 1, "nccl")
LARGE = 1 << 28


@pytest.mark.parametrize(
    ("backend", "gloo"),
    [
        ("nccl", False),
        ("cpu:gloo,cuda:nccl", False),
        ("cuda:gloo,cpu:gloo", True),
        ("gloo", True),
        ("undefined", False),
    ],
)
def test_cuda_tensors_go_through_the_backend_that_is_named_for_them(backend: str, gloo: bool) -> None:
    assert is_gloo(backend) is gloo


def test_gloo_gathers_into_a_tensor_of_its_own_and_nccl_does_not(gpu: Session) -> None:
    output = torch.empty(2**20, device="cuda")
    before, extra_bytes = torch.cuda.memory_allocated(), {}
    for backend in ("gloo", "nccl"):
        group = VirtualGroup(Member(0, 1, gpu, OwnExchange()), ProcessGroup((0,), 0, 0, backend))
        torch.cuda.reset_peak_memory_stats()
        group.all_gather_single(output, output, None)
        extra_bytes[backend] = torch.cuda.max_memory_allocated() - before
    assert extra_bytes == {"gloo": 2**22, "nccl": 0}


def test_lists_are_flattened_where_their_tensors_are_alike(gpu: Session) -> None:
    alike = [torch.empty(4, device="cuda") for _ in range(3)]
    assert flat_tensor(alike).shape == (3, 4)
    assert flat_tensor([*alike, torch.empty(5, device="cuda")]) is None


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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(profiler, "note", lambda *words: found.append(words))
    return found


def test_a_group_has_a_lane_and_its_ranks_a_distance(gpu: Session, told: list[tuple[object, ...]]) -> None:
    member = Member(0, 8, gpu, OwnExchange())
    member.note(WORLD, "all_reduce", 4096)
    member.note(HALF, "all_gather_into_tensor", 512)
    member.note(WORLD, "broadcast", 64)
    assert told == [
        ("collective", "all_reduce", 1, 4096, 8, 1, 1),
        ("collective", "all_gather_into_tensor", 2, 512, 4, 2, 2),
        ("collective", "broadcast", 3, 64, 8, 1, 1),
    ]


def test_messages_with_a_peer_have_a_lane_of_their_own(gpu: Session, told: list[tuple[object, ...]]) -> None:
    member = Member(0, 8, gpu, OwnExchange())
    member.note(WORLD, "send", 128, (0, 4))
    assert told == [("collective", "send", 1, 128, 2, 4, 1)]


def test_who_waits_is_told_and_host_tensors_are_not(gpu: Session, told: list[tuple[object, ...]]) -> None:
    member = Member(0, 8, gpu, OwnExchange())
    assert member.note(WORLD, "all_reduce", 0) == 0
    work = DoneWork([], noted=member.note(WORLD, "all_reduce", 8))
    work.wait()
    work.get_future()
    assert told[1:] == [("stream", "wait_collective", 1), ("stream", "future_collective", 1)]

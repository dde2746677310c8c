"""Streams and events: genuine PyTorch objects over the native half, with the ids that a real card gives."""

from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(find_gpu("h200"), "2.11.0")
    session.open()
    yield session
    session.close()


def test_classes_are_the_plain_ones_too(session: Session) -> None:
    assert isinstance(torch.cuda.Stream(), torch.Stream) and isinstance(torch.cuda.Event(), torch.Event)
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"


def test_ids_and_priorities(session: Session) -> None:
    default = torch.cuda.current_stream()
    assert default == torch.cuda.default_stream() and default.stream_id == default.cuda_stream == default.priority == 0
    assert repr(default) == "<torch.cuda.Stream device=cuda:0 cuda_stream=0x0>"
    plain, urgent = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert plain.stream_id % 32 == 3 and plain.priority == 0
    assert urgent.stream_id % 32 == 5 and urgent.priority == -1
    assert torch.cuda.Stream(priority=-5).priority == -3
    assert torch.cuda.Stream(device="cuda:0", priority=3).priority == 0
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert plain != urgent and plain.device == torch.device("cuda:0")


def test_streams_come_round_again(session: Session) -> None:
    ids = [torch.cuda.Stream().stream_id for _ in range(64)]
    assert ids[:32] == ids[32:] and len(set(ids)) == 32


def test_memory_goes_to_the_pool_of_its_stream(session: Session) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side) as nothing:
        assert nothing is None and torch.cuda.current_stream() == side
        there = torch.empty(10, device="cuda")
    here = torch.empty(10, device="cuda")
    segments = {segment["address"]: segment["stream"] for segment in torch.cuda.memory_snapshot()}
    assert segments[there.data_ptr()] == side.cuda_stream and segments[here.data_ptr()] == 0
    assert torch.cuda.current_stream().stream_id == 0


def test_backward_runs_on_the_stream_of_forward(session: Session) -> None:
    weight = torch.empty(1000, 1000, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        loss = (weight * 2).sum()
    loss.backward()
    assert weight.grad is not None
    segments = [s for s in torch.cuda.memory_snapshot() if s["stream"] == side.cuda_stream]
    assert any(s["address"] <= weight.grad.data_ptr() < s["address"] + s["total_size"] for s in segments)


def test_a_recorded_block_waits_for_its_stream(session: Session) -> None:
    side = torch.cuda.Stream()
    block = torch.empty(10, device="cuda")
    address = block.data_ptr()
    block.record_stream(side)
    del block
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 512
    assert torch.empty(10, device="cuda").data_ptr() != address
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0


def test_events_measure_the_host(session: Session) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert repr(start) == "<torch.cuda.Event uninitialized>" and start.query()
    with pytest.raises(ValueError, match="Both events must be recorded"):
        start.elapsed_time(end)
    start.record()
    sum(range(10_000))
    end.record(torch.cuda.current_stream())
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000 and start.query()
    assert repr(start).startswith("<torch.cuda.Event 0x")
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(end)


def test_streams_wait_for_each_other(session: Session) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    event.wait(side)
    side.synchronize()
    assert side.query()


def test_external_streams_keep_their_handle(session: Session) -> None:
    side = torch.cuda.Stream()
    wrapped = torch.cuda.ExternalStream(side.cuda_stream)
    assert wrapped.cuda_stream == side.cuda_stream
    assert torch.cuda.get_stream_from_external(side.cuda_stream).stream_id == side.stream_id
    address = torch.cuda.caching_allocator_alloc(100, stream=side)
    assert torch.cuda.memory_snapshot()[0]["stream"] == side.cuda_stream
    torch.cuda.caching_allocator_delete(address)


def test_the_accelerator_speaks_of_the_same_streams(session: Session) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    plain = torch.Stream("cuda")
    torch.accelerator.set_stream(plain)
    assert torch.cuda.current_stream().stream_id == plain.stream_id == torch.accelerator.current_stream().stream_id
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.accelerator.synchronize()

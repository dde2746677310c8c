"""Memory history and snapshots: PyTorch's own viewer must open what is written, and find what it looks for."""

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402
from torch.cuda import _memory_viz as viewer  # noqa: E402

from tonnage.virtual.cuda.history import Ring  # noqa: E402

MIB = 2**20


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(find_gpu("h200"), "2.11.0")
    session.open()
    yield session
    session.close()


def trace() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][0]


def work() -> torch.Tensor:
    gone = torch.empty(2**22, device="cuda")
    kept = torch.empty(100, device="cuda")
    del gone
    torch.cuda.empty_cache()
    return kept


def test_the_events_of_a_run_in_order(session: Session) -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = work()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**41, dtype=torch.uint8, device="cuda")
    events = trace()
    assert [(e["action"], e["size"]) for e in events] == [
        ("segment_alloc", 16 * MIB), ("alloc", 16 * MIB), ("segment_alloc", 2 * MIB), ("alloc", 400),
        ("free_requested", 16 * MIB), ("free_completed", 16 * MIB), ("segment_free", 16 * MIB), ("oom", 2**41),
    ]  # fmt: skip
    assert "addr" not in events[-1] and 0 < events[-1]["device_free"] < 150109880320
    assert events[1]["addr"] == events[0]["addr"] and events[3]["addr"] == kept.data_ptr()
    times = [e["time_us"] for e in events]
    assert times == sorted(times) and times[0] > 1.7e15


def test_entries_have_the_fields_of_a_real_snapshot(session: Session) -> None:
    torch.cuda.memory._record_memory_history()
    kept = work()
    taken = torch.cuda.memory._snapshot()
    assert kept.is_cuda and set(taken) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    entry = {"action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "frames"}
    assert all(set(e) == entry for e in taken["device_traces"][0])
    segment = "device address total_size allocated_size active_size requested_size stream segment_type segment_pool_id"
    assert set(taken["segments"][0]) == {*segment.split(), "is_expandable", "frames", "blocks"}
    assert set(taken["segments"][0]["blocks"][0]) == {"address", "size", "requested_size", "state", "frames"}


def test_stacks_are_the_scripts(session: Session) -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = work()
    alloc = next(e for e in trace() if e["action"] == "alloc")
    assert [frame["name"] for frame in alloc["frames"]][:2] == ["work", "test_stacks_are_the_scripts"]
    assert not any("src/tonnage" in frame["filename"] for frame in alloc["frames"])
    freed = next(e for e in trace() if e["action"] == "segment_free")
    assert [frame["name"] for frame in freed["frames"]][:2] == ["empty_cache", "work"]
    block = torch.cuda.memory._snapshot()["segments"][0]["blocks"][0]
    assert block["state"] == "active_allocated" and block["frames"][0]["name"] == "work"
    if hasattr(torch.cuda.memory, "_allocation_traceback"):
        assert torch.cuda.memory._allocation_traceback(kept.data_ptr()) == block["frames"]


@pytest.mark.parametrize(
    ("context", "on_block", "on_alloc", "on_free"),
    [(None, 0, 0, 0), ("state", 1, 0, 0), ("alloc", 1, 1, 0), ("all", 1, 1, 1)],
)
def test_context_says_whose_stacks(
    session: Session, context: str | None, on_block: bool, on_alloc: bool, on_free: bool
) -> None:
    torch.cuda.memory._record_memory_history("all", context=context)
    kept = work()
    taken = torch.cuda.memory._snapshot()
    entries = {e["action"]: e for e in taken["device_traces"][0]}
    assert bool(taken["segments"][0]["blocks"][0]["frames"]) == on_block
    assert ("frames" in entries["alloc"]) == on_alloc and ("frames" in entries["free_completed"]) == on_free
    assert kept.is_cuda


def test_the_modes(session: Session) -> None:
    torch.cuda.memory._record_memory_history()
    kept = work()
    before = len(trace())
    assert trace()[-1]["action"] == "snapshot" and trace()[-1]["size"] == 512 and "frames" not in trace()[-1]
    torch.cuda.memory._record_memory_history("state")
    assert len(trace()) == before + 4
    torch.cuda.memory._record_memory_history(None)
    assert trace() == [] and not torch._C._cuda_isHistoryEnabled()
    assert torch.cuda.memory._snapshot()["segments"][0]["blocks"][0]["frames"]
    other = torch.empty(100, device="cuda")
    blocks = torch.cuda.memory._snapshot()["segments"][0]["blocks"]
    assert [bool(block["frames"]) for block in blocks[:2]] == [True, False]
    assert kept.is_cuda and other.is_cuda


def test_a_new_block_does_not_inherit_a_stack(session: Session) -> None:
    torch.cuda.memory._record_memory_history("state")
    kept = torch.empty(100, device="cuda")
    torch.cuda.memory._record_memory_history(None)
    del kept
    other = torch.empty(100, device="cuda")
    assert other.is_cuda and torch.cuda.memory._snapshot()["segments"][0]["blocks"][0]["frames"] == []


def test_limits_and_skipped_actions(session: Session) -> None:
    torch.cuda.memory._record_memory_history(max_entries=3)
    work()
    assert [e["action"] for e in trace()] == ["segment_free", "free_requested", "free_completed"]
    torch.cuda.memory._record_memory_history(None)
    if "skip_actions" in torch.cuda.memory._record_memory_history_impl.__code__.co_varnames:
        torch.cuda.memory._record_memory_history(skip_actions=["free_requested", "segment_alloc", "segment_free"])
        work()
        assert [e["action"] for e in trace()] == ["alloc", "alloc", "free_completed", "free_completed"]


def test_the_signature_of_old(session: Session) -> None:
    torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=100, trace_alloc_record_context=True)
    kept = work()
    assert len(trace()) == 7 and kept.is_cuda
    torch.cuda.memory._record_memory_history(False)
    assert trace() == []
    with pytest.raises(RuntimeError, match="expected state to be"):
        torch.cuda.memory._record_memory_history("everything")


def test_a_free_that_waits_completes_later(session: Session) -> None:
    torch.cuda.memory._record_memory_history()
    block = torch.empty(100, device="cuda")
    block.record_stream(torch.cuda.Stream())
    del block
    assert trace()[-1]["action"] == "free_requested"
    assert torch.cuda.memory._snapshot()["segments"][0]["blocks"][0]["state"] == "active_pending_free"
    torch.cuda.synchronize()
    assert "free_completed" in [e["action"] for e in trace()]


def test_annotations_and_metadata(session: Session) -> None:
    torch.cuda.memory._record_memory_history()
    with torch.autograd.profiler.record_function("part"):
        pass
    marks = torch.cuda.memory._snapshot()["external_annotations"]
    assert [(m["stage"], m["name"], m["device"]) for m in marks] == [("START", "part", 0), ("END", "part", 0)]
    torch.cuda.memory._set_memory_metadata("epoch 3")
    held = torch.empty(1, device="cuda")
    assert held.is_cuda and trace()[-1]["user_metadata"] == torch.cuda.memory._get_memory_metadata() == "epoch 3"


def train() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 512, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_pytorchs_viewer_opens_the_file(session: Session, tmp_path: Path, settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    model = train()
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    taken = pickle.loads(file.read_bytes())
    assert taken["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings
    assert "Summary of segments" in viewer.segsum(taken) and "TOTAL MEM" in viewer.trace(taken)
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "<script" in plot(taken)
    assert viewer.calc_active(taken["segments"][0]) >= 0
    balance = Counter(e["action"] for e in taken["device_traces"][0])
    live = sum(b["state"] == "active_allocated" for s in taken["segments"] for b in s["blocks"])
    assert balance["alloc"] - balance["free_requested"] == live
    assert balance["free_requested"] == balance["free_completed"]
    assert any(m["name"].startswith("Optimizer.step#AdamW") for m in taken["external_annotations"])
    assert model


def test_backward_has_no_python_stack_of_its_own_thread(session: Session) -> None:
    torch.cuda.memory._record_memory_history()
    model = train()
    assert model and any(e["action"] == "alloc" and e["frames"] == [] for e in trace())


@given(limit=st.integers(1, 8), count=st.integers(0, 40))
def test_a_ring_keeps_the_last_ones(limit: int, count: int) -> None:
    ring = Ring()
    ring.limit = limit
    for number in range(count):
        ring.add({"number": number})
    assert [e["number"] for e in ring.in_order()] == list(range(max(0, count - limit), count))


def test_a_ring_that_shrinks_keeps_what_it_has() -> None:
    ring = Ring()
    ring.limit = 3
    for number in range(3):
        ring.add({"number": number})
    ring.limit = 1
    ring.add({"number": 3})
    ring.add({"number": 4})
    assert len(ring.in_order()) == 3 and {"number": 4} in ring.in_order()

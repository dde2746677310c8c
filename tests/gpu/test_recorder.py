"""The recorder on a real GPU: categories against the live model, lines, phases, and what it does when memory runs out."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]

from tonnage.ledger import Category  # noqa: E402
from tonnage.recorder import Recorder, record_on_oom  # noqa: E402


def blocks_of(tensors: Any) -> int:
    """Bytes of the allocator's blocks under these tensors, small ones rounded to 512."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(-(-size // 512) * 512 for size in storages.values())


class Trained:
    """Three steps of a small network, recorded up to just before the last optimizer step."""

    def __init__(
        self, autocast: bool = False, checkpoint: bool = False, compiled: bool = False, accumulate: int = 1
    ) -> None:
        recorder = Recorder()
        recorder.start()
        blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
        self.model = torch.nn.Sequential(*blocks).cuda()
        optimizer = torch.optim.AdamW(self.model.parameters())
        whole = torch.compile(self.model) if compiled else None
        for step in range(3):
            for _ in range(accumulate):
                batch = torch.randn(256, 512).cuda()
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    out = whole(batch) if whole else batch
                    for block in () if whole else blocks:
                        run = torch.utils.checkpoint.checkpoint
                        out = run(block, out, use_reentrant=False) if checkpoint else block(out)
                    loss = out.float().square().mean()
                loss.backward()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        self.states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        self.recording = recorder.stop()

    def alive(self, category: Category) -> int:
        return sum(a.block_bytes for a in self.recording.allocations if a.died is None and a.category is category)


WAYS = [{}, {"autocast": True}, {"checkpoint": True}, {"accumulate": 3}, {"compiled": True}]


@pytest.mark.parametrize("options", WAYS)
def test_categories_are_those_of_the_live_model(options: dict[str, Any]) -> None:
    trained = Trained(**options)
    parameters = list(trained.model.parameters())
    assert trained.alive(Category.PARAMETERS) == blocks_of(parameters)
    assert trained.alive(Category.GRADIENTS) == blocks_of([p.grad for p in parameters])
    assert trained.alive(Category.OPTIMIZER_STATES) == blocks_of(trained.states)


def test_the_peak_is_the_allocator_s_and_every_byte_has_a_category() -> None:
    trained = Trained()
    assert trained.recording.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert trained.recording.ledger().total_bytes == trained.recording.peak_allocated_bytes


def test_lines_phases_steps_and_modules_are_known() -> None:
    recording = Trained().recording
    activations = [a for a in recording.allocations if a.category is Category.ACTIVATIONS and a.phase == "forward"]
    assert {a.line.split(":")[0] for a in activations} == {"test_recorder.py"}
    assert {a.step for a in activations} >= {1, 2, 3}
    assert any(a.module for a in activations)
    assert {mark.name for mark in recording.marks if mark.kind == "phase"} >= {"forward", "backward", "optimizer"}


def test_running_out_of_memory_writes_a_recording_and_raises(tmp_path: Path) -> None:
    target = tmp_path / "oom.tonnage"
    stop = record_on_oom(target)
    kept = [torch.empty(2**28, device="cuda")]
    with pytest.raises(torch.OutOfMemoryError):
        kept.append(torch.empty(2**40, device="cuda"))
    stop()
    from tonnage.recording import read_recording

    recording = read_recording(target)
    assert recording.header.outcome == "oom"
    assert recording.oom is not None
    assert recording.oom.requested_bytes >= 2**42

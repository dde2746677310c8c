"""A real Trainer on the virtual GPU, and the same as if the card were there."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tonnage import virtual_gpu
from tonnage.integrations import steps
from tonnage.units import GIB, MIB

if TYPE_CHECKING:
    from transformers import Trainer

    from tonnage.integrations.transformers_callback import MemoryCallback

PARAMETER_BYTES = 4 * (512 * 512 + 512) * 2


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Inside a virtual GPU even a torchvision that was built for CUDA lets transformers import."""
    with virtual_gpu("h200"):
        import transformers.trainer  # noqa: F401


class Net(nn.Module):
    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
        self.kept: list[torch.Tensor] | None = [] if leaks else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (self.net(x) - labels).square().mean()
        if self.kept is not None:
            self.kept.append(torch.zeros(2**18, device=x.device))
        return {"loss": loss}


def train(
    folder: Path, *, leaks: bool = False, report_to: str = "none", every: int = 1
) -> "tuple[Trainer, MemoryCallback]":
    from transformers import Trainer, TrainingArguments

    from tonnage.integrations.transformers_callback import MemoryCallback

    data = [{"x": torch.randn(512), "labels": torch.randn(512)} for _ in range(48)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=8, logging_steps=every, report_to=report_to,
        save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=Net(leaks), args=arguments, train_dataset=data)
    callback = MemoryCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    return trainer, callback


def logged(trainer: "Trainer", key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_every_step_s_peak_and_categories_are_logged(tmp_path: Path) -> None:
    with virtual_gpu("h200") as gpu:
        trainer, callback = train(tmp_path)
        steps_of_run = {step.step: step.peak_allocated_bytes for step in gpu.recording.steps}
        assert gpu.peak_allocated_bytes == max(steps_of_run.values())
    peaks = logged(trainer, "memory/peak_allocated_gib")
    assert len(peaks) == 6
    assert max(peaks) * GIB == max(steps_of_run.values())
    step = callback.latest
    assert step is not None
    assert step.ledger.total_bytes == step.peak_allocated_bytes
    assert logged(trainer, "memory/parameters_gib") == [pytest.approx(PARAMETER_BYTES / GIB)] * 6
    assert logged(trainer, "memory/optimizer_states_gib")[-1] == pytest.approx(2 * PARAMETER_BYTES / GIB, rel=0.01)
    assert logged(trainer, "memory/leak_mib_per_step") == [0.0] * 6
    assert len(logged(trainer, "loss")) == 6


def test_between_two_logs_the_highest_peak_counts(tmp_path: Path) -> None:
    with virtual_gpu("h200"):
        trainer, _ = train(tmp_path, every=3)
    assert len(logged(trainer, "memory/peak_allocated_gib")) == 2
    assert len(logged(trainer, "loss")) == 2


def test_a_leak_is_measured_and_told_once_with_its_line(tmp_path: Path) -> None:
    with virtual_gpu("h200"), pytest.warns(UserWarning, match="grows by 1.00 MiB in every step") as told:
        trainer, callback = train(tmp_path, leaks=True)
    words = [str(w.message) for w in told if "grows" in str(w.message)]
    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "2**18" in text)
    assert words == [f"GPU memory grows by 1.00 MiB in every step, kept from {Path(__file__).name}:{line}."]
    assert logged(trainer, "memory/leak_mib_per_step")[-1] == 1.0
    assert callback.latest is not None
    assert callback.latest.leak_bytes == MIB


def test_it_reaches_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing import event_accumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    with virtual_gpu("h200", write=True):
        trainer, _ = train(tmp_path, report_to="tensorboard")
    board = event_accumulator.EventAccumulator(str(next((tmp_path).rglob("events.out.*")).parent))
    board.Reload()
    found = [event.value for event in board.Scalars("train/memory/peak_allocated_gib")]
    assert found == pytest.approx(logged(trainer, "memory/peak_allocated_gib"))


def test_on_a_card_that_is_there_the_counters_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_source", lambda: steps._CudaSteps())
    with virtual_gpu("h200"):
        trainer, callback = train(tmp_path)
    step = callback.latest
    assert step is not None
    assert step.ledger.total_bytes == step.peak_allocated_bytes
    assert step.ledger.measured
    by_category = dict(step.ledger.bytes_by_category)
    assert by_category["parameters"] == by_category["gradients"] == PARAMETER_BYTES
    assert by_category["optimizer_states"] == pytest.approx(2 * PARAMETER_BYTES, rel=0.001)
    assert len(logged(trainer, "memory/peak_allocated_gib")) == 6


def test_without_a_gpu_it_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*GPU memory.*")
        trainer, callback = train(tmp_path)
    assert callback.latest is None
    assert logged(trainer, "memory/peak_allocated_gib") == []
    assert len(logged(trainer, "loss")) == 6

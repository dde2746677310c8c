"""A real Lightning run on the virtual GPU."""

import csv
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tonnage import virtual_gpu
from tonnage.integrations import steps
from tonnage.units import GIB, MIB

if TYPE_CHECKING:
    from tonnage.integrations.lightning_callback import MemoryCallback

PARAMETER_BYTES = 4 * (512 * 512 + 512) * 2


def fit(folder: Path, *, leaks: bool = False, accelerator: str = "gpu", every: int = 1) -> "MemoryCallback":
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from tonnage.integrations.lightning_callback import MemoryCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
            self.kept: list[torch.Tensor] = []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            if leaks:
                self.kept.append(torch.zeros(2**18, device=self.device))
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = MemoryCallback()
    trainer = lightning.Trainer(
        max_steps=6, accelerator=accelerator, devices=1, logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=every, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(48, 512)), batch_size=8))
    return callback


def logged(folder: Path, key: str) -> list[float]:
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [float(row[key]) for row in csv.DictReader(file) if row.get(key)]


def test_every_step_s_peak_and_categories_are_logged(tmp_path: Path) -> None:
    with virtual_gpu("h200", write=True) as gpu:
        callback = fit(tmp_path)
        highest = gpu.peak_allocated_bytes
    peaks = logged(tmp_path, "memory/peak_allocated_gib")
    assert len(peaks) == 6
    assert max(peaks) * GIB == pytest.approx(highest)
    step = callback.latest
    assert step is not None
    assert step.ledger.total_bytes == step.peak_allocated_bytes
    assert logged(tmp_path, "memory/parameters_gib") == [pytest.approx(PARAMETER_BYTES / GIB)] * 6
    assert logged(tmp_path, "memory/leak_mib_per_step") == [0.0] * 6


def test_between_two_logs_the_highest_peak_counts(tmp_path: Path) -> None:
    with virtual_gpu("h200", write=True):
        fit(tmp_path, every=3)
    assert len(logged(tmp_path, "memory/peak_allocated_gib")) == 2


def test_a_leak_is_measured_and_told_with_its_line(tmp_path: Path) -> None:
    with (
        virtual_gpu("h200", write=True),
        pytest.warns(UserWarning, match=r"grows by 1.00 MiB in every step, kept from test_light"),
    ):
        callback = fit(tmp_path, leaks=True)
    assert callback.latest is not None
    assert callback.latest.leak_bytes == MIB
    assert logged(tmp_path, "memory/leak_mib_per_step")[-1] == 1.0


def test_on_a_card_that_is_there_the_counters_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_source", lambda: steps._CudaSteps())
    with virtual_gpu("h200", write=True):
        callback = fit(tmp_path)
    step = callback.latest
    assert step is not None
    assert step.ledger.total_bytes == step.peak_allocated_bytes
    by_category = dict(step.ledger.bytes_by_category)
    assert by_category["parameters"] == by_category["gradients"] == PARAMETER_BYTES
    assert by_category["optimizer_states"] == pytest.approx(2 * PARAMETER_BYTES, rel=0.001)


def test_without_a_gpu_it_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*GPU memory.*")
        callback = fit(tmp_path, accelerator="cpu")
    assert callback.latest is None
    assert logged(tmp_path, "memory/peak_allocated_gib") == []

"""A fitted Lightning training against the same training as it is: a real Llama on the CPU, by explicit plans."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import torchvision_names  # noqa: F401

# isort: split
import lightning
from lightning.pytorch.callbacks import Callback

from integrations.fit_runs import a_plan, llama, rows
from tonnage.errors import RequestError
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.integrations.fit_lightning import FitCallback

STEPS = 5


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return {"loss": loss, "index": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), "interval": "step"}]


def train(
    folder: Path, *callbacks: Callback, module: Module | None = None, checkpoint: Path | None = None, **settings: Any
) -> tuple[lightning.Trainer, Module]:
    module = module or Module()
    trainer = lightning.Trainer(
        **{"max_steps": STEPS, "accelerator": "cpu", "devices": 1, "gradient_clip_val": 0.5, **settings},
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(), batch_size=4), ckpt_path=checkpoint)  # type: ignore[arg-type]
    return trainer, module


def assert_same_run(found: Module, expected: Module, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found.seen), torch.tensor(expected.seen), rtol=tolerance, atol=tolerance)
    parameters = expected.state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, parameters[name], rtol=0, atol=max(5e-5, 10 * tolerance))


def recompute() -> Recompute:
    return Recompute.all(Module())


PLANS: dict[str, Callable[[], tuple[Technique, ...]]] = {
    "nothing": lambda: (),
    "model side": lambda: (ChunkedLoss(), recompute()),
    "parts": lambda: (MicroBatches(count=2),),
    "states on the host": lambda: (HostStates(how="host"), MicroBatches(count=4)),
}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Module]:
    """The module after a plain training, by the batches of a step."""
    return cache(lambda batches: train(tmp_path_factory.mktemp("plain"), accumulate_grad_batches=batches)[1])


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_losses_and_parameters_are_the_plain_run_s(
    tmp_path: Path, name: str, batches: int, plain_run: Callable[[int], Module]
) -> None:
    plain = plain_run(batches)
    _, fitted = train(tmp_path, FitCallback(plan=a_plan(*PLANS[name]())), accumulate_grad_batches=batches)
    assert len(fitted.seen) == len(plain.seen) == STEPS * batches
    assert_same_run(fitted, plain)


def test_the_step_inside_backward_where_nothing_clips(tmp_path: Path) -> None:
    _, plain = train(tmp_path, gradient_clip_val=None)
    _, fitted = train(tmp_path, FitCallback(plan=a_plan(StepInBackward())), gradient_clip_val=None)
    assert_same_run(fitted, plain)


def test_autocast_stays_lightning_s(tmp_path: Path) -> None:
    _, plain = train(tmp_path, precision="bf16-mixed")
    _, fitted = train(tmp_path, FitCallback(plan=a_plan(recompute(), MicroBatches(count=2))), precision="bf16-mixed")
    assert_same_run(fitted, plain, tolerance=5e-3)
    with pytest.raises(RequestError, match="precision='bf16-mixed' does the same"):
        train(tmp_path, FitCallback(plan=a_plan(Autocast())), precision="bf16-mixed")


def test_after_training_the_module_is_plain(tmp_path: Path) -> None:
    callback = FitCallback(plan=a_plan(recompute(), MicroBatches(count=2)))
    _, module = train(tmp_path, callback)
    names = ("training_step", "backward", "optimizer_step", "log", "forward")
    assert not set(names) & set(module.__dict__)
    assert callback.fitted is not None
    assert [technique.name for technique in callback.fitted.techniques] == []
    _, again = train(tmp_path, callback)
    assert_same_run(again, module)


def test_a_step_that_raises_leaves_the_module_plain(tmp_path: Path) -> None:
    class Raising(Module):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("in the middle")
            return super().training_step(batch, batch_idx)

    module = Raising()
    with pytest.raises(RuntimeError, match="in the middle"):
        train(tmp_path, FitCallback(plan=a_plan(recompute(), MicroBatches(count=2))), module=module)
    assert "training_step" not in module.__dict__
    assert "forward" not in module.model.model.layers[0].__dict__
    assert all(parameter.grad is None for parameter in module.parameters())


def test_checkpoints_are_plain_both_ways(tmp_path: Path) -> None:
    class Saving(Callback):
        def __init__(self, name: str) -> None:
            self.path = tmp_path / name

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(self.path, weights_only=False)

    def fit() -> Callback:
        return FitCallback(plan=a_plan(HostStates(how="host"), MicroBatches(count=2)))

    train(tmp_path, Saving("plain.ckpt"))
    train(tmp_path, fit(), Saving("fitted.ckpt"))
    _, expected = train(tmp_path, checkpoint=tmp_path / "plain.ckpt")
    _, fitted_first = train(tmp_path, checkpoint=tmp_path / "fitted.ckpt")
    _, fitted_then = train(tmp_path, fit(), checkpoint=tmp_path / "plain.ckpt")
    for found in (fitted_first, fitted_then):
        assert_same_run(found, expected)
        assert len(found.seen) == STEPS - 3


def test_what_is_logged_is_logged_once_a_micro_batch_and_never_while_measuring(tmp_path: Path) -> None:
    class Logging(Module):
        logged = 0

        def log(self, *_: Any, **__: Any) -> None:
            self.logged += 1

    _, module = train(tmp_path, FitCallback(plan=a_plan(MicroBatches(count=2))), module=Logging())
    assert module.logged == 2 * STEPS  # type: ignore[attr-defined]


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class OwnBackward(Module):
    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (TwoOptimizers, {"gradient_clip_val": None}, "automatic_optimization is off"),
        (OwnBackward, {}, "has a backward of its own"),
        (Module, {"gradient_clip_algorithm": "value"}, "clipped by value"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, module: type[Module], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        train(tmp_path, FitCallback(plan=a_plan()), module=module(), **settings)
    assert refusal.value.hint


def test_a_step_inside_backward_is_refused_where_gradients_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"several backward passes \(accumulate_grad_batches\)"):
        train(tmp_path, FitCallback(plan=a_plan(StepInBackward())), accumulate_grad_batches=2, gradient_clip_val=None)


def test_on_the_virtual_gpu_a_plan_is_chosen_within_the_budget() -> None:
    script = Path(__file__).parent / "fit_on_virtual_gpu.py"
    process = subprocess.run([sys.executable, str(script), "lightning"], capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    for found in json.loads(process.stdout.splitlines()[-1]).values():
        assert found["peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
        assert found["steps"] == 2

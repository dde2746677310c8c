"""A fitted Trainer against the same Trainer as it is: a real Llama on the CPU, by explicit plans."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchvision_names  # noqa: F401

# isort: split
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

import tonnage
from integrations.fit_runs import a_plan, gpt2, llama, rows
from tonnage.errors import RequestError
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.integrations.fit_trainer import ITEMS, join, with_items

STEPS = 5


def a_trainer(
    folder: Path,
    model: Callable[[], nn.Module] = llama,
    trainer: type[Trainer] = Trainer,
    data: list[dict[str, Tensor]] | None = None,
    **settings: Any,
) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    return trainer(
        model=model(), args=TrainingArguments(**{**given, **settings}), train_dataset=rows() if data is None else data
    )


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_same_run(fitted: Trainer, plain: Trainer, tolerance: float = 1e-6) -> None:
    for key in ("loss", "grad_norm", "learning_rate"):
        found, expected = logged(fitted, key), logged(plain, key)
        assert len(found) == len(expected) >= STEPS
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    expected_parameters = plain.model.state_dict()
    for name, tensor in fitted.model.state_dict().items():
        torch.testing.assert_close(tensor, expected_parameters[name], rtol=0, atol=max(5e-5, 10 * tolerance))


PLANS: dict[str, Callable[[nn.Module], tuple[Technique, ...]]] = {
    "nothing": lambda _: (),
    "model side": lambda model: (ChunkedLoss(), Recompute.all(model)),
    "fewer rows": lambda _: (MicroBatches(count=8),),
    "more rows": lambda _: (MicroBatches(count=2),),
    "one by one": lambda _: (HostStates(), MicroBatches(count=4)),
    "everything": lambda model: (ChunkedLoss(), Recompute.all(model), HostStates(how="host"), MicroBatches(count=3)),
}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = a_trainer(tmp_path_factory.mktemp("plain"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", PLANS)
def test_losses_norms_and_parameters_are_the_plain_trainer_s(tmp_path: Path, name: str, plain_run: Trainer) -> None:
    fitted = a_trainer(tmp_path)
    tonnage.fit_trainer(fitted, plan=a_plan(*PLANS[name](fitted.model)))
    fitted.train()
    assert_same_run(fitted, plain_run)


SETTINGS: dict[str, dict[str, Any]] = {
    "autocast": {"bf16": True},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "one batch a step": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "a rest of three batches": {"gradient_accumulation_steps": 5, "train_sampling_strategy": "sequential"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trainer_s_own_arguments_count(tmp_path: Path, name: str) -> None:
    plain, fitted = (a_trainer(tmp_path, **SETTINGS[name]) for _ in range(2))
    plain.train()
    tonnage.fit_trainer(fitted, plan=a_plan(Recompute.all(fitted.model), MicroBatches(count=4)))
    fitted.train()
    assert_same_run(fitted, plain, tolerance=5e-3 if name == "autocast" else 1e-6)


def test_dropout_draws_what_the_plain_trainer_draws(tmp_path: Path) -> None:
    plain = a_trainer(tmp_path, gpt2)
    plain.train()
    fitted = a_trainer(tmp_path, gpt2)  # it seeds the random numbers
    tonnage.fit_trainer(fitted, plan=a_plan(Recompute.all(fitted.model)))
    fitted.train()
    assert_same_run(fitted, plain)


def test_batches_of_different_lengths_stay_apart(tmp_path: Path) -> None:
    settings = {"data": rows((12, 8, 10)), "train_sampling_strategy": "sequential"}
    plain, fitted = a_trainer(tmp_path, **settings), a_trainer(tmp_path, **settings)
    plain.train()
    tonnage.fit_trainer(fitted, plan=a_plan(MicroBatches(count=8)))
    fitted.train()
    assert_same_run(fitted, plain)


class MeanOfBatches(Trainer):
    """A loss that is not told how many items a step has: the Trainer takes the mean of its batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class Weighted(Trainer):
    """A subclass with a loss and a step of its own, which calls what it stands on."""

    steps_seen = 0

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
        loss: Tensor = super().compute_loss(model, inputs, **kwargs)
        return loss * 3

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps_seen += 1
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("kind", [MeanOfBatches, Weighted])
def test_subclasses_keep_their_ways(tmp_path: Path, kind: type[Trainer]) -> None:
    plain, fitted = (a_trainer(tmp_path, trainer=kind) for _ in range(2))
    plain.train()
    tonnage.fit_trainer(fitted, plan=a_plan(ChunkedLoss(), MicroBatches(count=8 if kind is Weighted else 2)))
    fitted.train()
    assert_same_run(fitted, plain)
    assert type(fitted).__name__ == kind.__name__
    assert getattr(fitted, "steps_seen", 0) == getattr(plain, "steps_seen", 0)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=2)


def test_a_data_loader_of_one_s_own_and_a_sample_will_do(tmp_path: Path) -> None:
    plain, fitted, sampled = (a_trainer(tmp_path, trainer=OwnLoader) for _ in range(3))
    tonnage.fit_trainer(fitted, plan=a_plan(MicroBatches(count=2)))
    tonnage.fit_trainer(sampled, plan=a_plan(MicroBatches(count=2)), sample=next(iter(plain.get_train_dataloader())))
    for trainer in (plain, fitted, sampled):
        trainer.train()
    assert_same_run(fitted, plain)
    assert_same_run(sampled, plain)


class Deaf(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = model(**inputs).loss
        loss.backward()
        return loss.detach()


def test_a_training_step_that_passes_fit_over_is_told(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, trainer=Deaf)
    tonnage.fit_trainer(trainer, plan=a_plan())
    with pytest.raises(RequestError, match=r"Deaf has a training_step .* does not call super\(\)"):
        trainer.train()


# Steps inside backward ------------------------------------------------------------------------------------------------


def test_a_step_inside_backward_takes_the_batches_of_a_step_as_one(tmp_path: Path) -> None:
    plain, fitted = (a_trainer(tmp_path, max_grad_norm=0.0) for _ in range(2))
    plain.train()
    tonnage.fit_trainer(fitted, plan=a_plan(StepInBackward()))
    fitted.train()
    assert logged(fitted, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert logged(fitted, "grad_norm") == []


def test_a_step_inside_backward_is_refused_where_gradients_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="step-in-backward, which cannot be used in this training loop: a step has"):
        tonnage.fit_trainer(a_trainer(tmp_path, gpt2, max_grad_norm=0.0), plan=a_plan(StepInBackward()))


def test_a_later_step_with_batches_unlike_is_told(tmp_path: Path) -> None:
    data = rows((12, 12, 12, 12, 8))
    trainer = a_trainer(tmp_path, data=data, train_sampling_strategy="sequential", max_grad_norm=0.0)
    tonnage.fit_trainer(trainer, plan=a_plan(StepInBackward()))
    with pytest.raises(RequestError, match="needs 4 backward passes"):
        trainer.train()


# Checkpoints ----------------------------------------------------------------------------------------------------------

CHECKPOINTED: dict[str, tuple[Technique, ...]] = {
    "states on the host": (HostStates(how="host"), MicroBatches(count=2)),
    "masters": (MasterWeights(),),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("fitted_first", [True, False])
def test_checkpoints_are_plain_both_ways(tmp_path: Path, name: str, fitted_first: bool) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3}
    whole = a_trainer(tmp_path / "whole")
    first, second = (a_trainer(tmp_path / "parts", **settings) for _ in range(2))
    tonnage.fit_trainer(whole, plan=a_plan(*CHECKPOINTED[name]))
    whole.train()
    tonnage.fit_trainer(first if fitted_first else second, plan=a_plan(*CHECKPOINTED[name]))
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    tolerance = 2e-2 if name == "masters" else 1e-6  # one half of the run computes in FP32
    assert logged(second, "loss") == pytest.approx(logged(whole, "loss"), rel=tolerance)
    saved = torch.load(tmp_path / "parts" / "checkpoint-3" / "optimizer.pt")
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"][0]["exp_avg"].dtype == torch.float32


# Undo and failure -----------------------------------------------------------------------------------------------------


def test_after_undo_the_trainer_is_plain_and_goes_on(tmp_path: Path) -> None:
    plain, fitted = a_trainer(tmp_path), a_trainer(tmp_path)
    fit = tonnage.fit_trainer(fitted, plan=a_plan(Recompute.all(fitted.model), HostStates(), MicroBatches(count=2)))
    for trainer in (plain, fitted):
        trainer.train()
    fit.undo()
    assert type(fitted) is Trainer
    assert isinstance(fitted.optimizer, torch.optim.AdamW)
    for trainer in (plain, fitted):
        trainer.train()
    assert logged(fitted, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)


def test_the_proof_holds_on_a_fitted_trainer(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    fit = tonnage.fit_trainer(trainer, plan=a_plan(ChunkedLoss(), MicroBatches(count=4)))
    trainer.train()
    assert fit.prove().worst_error < 1e-5


def test_where_fit_fails_the_trainer_is_as_it_was(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, gradient_checkpointing=True)
    with pytest.raises(RequestError, match="cannot stand together"), pytest.warns(UserWarning, match="turned off"):
        tonnage.fit_trainer(trainer, plan=a_plan(StepInBackward(), MicroBatches(count=2)))
    assert type(trainer) is Trainer
    assert trainer.optimizer is None
    assert trainer.args.gradient_checkpointing


def test_gradient_checkpointing_is_off_until_undo(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, gradient_checkpointing=True)
    with pytest.warns(UserWarning, match="fit chooses which blocks are recomputed"):
        fit = tonnage.fit_trainer(trainer, plan=a_plan())
    trainer.train()
    assert not trainer.model.is_gradient_checkpointing
    fit.undo()
    assert trainer.args.gradient_checkpointing


def test_to_look_at_a_sample_draws_no_random_number(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, gpt2)
    state = trainer.accelerator.gradient_state
    before = torch.get_rng_state(), random.getstate(), state.active_dataloader
    tonnage.fit_trainer(trainer, plan=a_plan())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert state.active_dataloader is before[2]


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.events.append("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.events.append("batch")

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        self.events.append("gradients" if all(gradient is not None for gradient in gradients) else "no gradients")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")


def test_callbacks_are_called_as_ever(tmp_path: Path) -> None:
    trainer, counting = a_trainer(tmp_path, max_steps=1), Counting()
    trainer.add_callback(counting)
    tonnage.fit_trainer(trainer, plan=a_plan(MicroBatches(count=2)))
    trainer.train()
    assert counting.events == ["begin", "batch", "batch", "batch", "gradients", "end"]


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auto_find_batch_size": True}, "makes the batch smaller"),
        ({"torch_compile": True}, "wraps the whole model"),
        ({"optim": "lomo"}, "takes its steps by itself"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        tonnage.fit_trainer(a_trainer(tmp_path, **settings), plan=a_plan())
    assert refusal.value.hint


def test_a_trainer_is_fitted_once(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    tonnage.fit_trainer(trainer, plan=a_plan())
    with pytest.raises(RequestError, match="fitted already"):
        tonnage.fit_trainer(trainer, plan=a_plan())


def test_autocast_is_the_trainer_s_where_it_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the Trainer's own bf16 does the same"):
        tonnage.fit_trainer(a_trainer(tmp_path, bf16=True), plan=a_plan(Autocast()))


def test_what_is_no_trainer_is_told() -> None:
    with pytest.raises(RequestError, match=r"wants a transformers\.Trainer, and got Linear"):
        tonnage.fit_trainer(nn.Linear(2, 2))


# On the virtual GPU ---------------------------------------------------------------------------------------------------


def test_on_the_virtual_gpu_a_plan_is_chosen_within_the_budget() -> None:
    script = Path(__file__).parent / "fit_on_virtual_gpu.py"
    process = subprocess.run([sys.executable, str(script), "trainer"], capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    for found in json.loads(process.stdout.splitlines()[-1]).values():
        assert found["peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
        assert found["steps"] == 2
        assert found["techniques"]


# Several batches as one -----------------------------------------------------------------------------------------------


def test_batches_that_differ_in_rows_alone_are_joined() -> None:
    joined = join([{"x": torch.zeros(2, 3), "scale": 2}, {"x": torch.ones(1, 3), "scale": 2}])
    assert joined is not None
    assert joined["x"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert joined["scale"] == 2


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(2, 4), "scale": 2},
        {"x": torch.ones(2, 3), "scale": 3},
        {"x": torch.ones(2, 3)},
        {"x": torch.ones(2, 3), "scale": torch.ones(2)},
    ],
)
def test_batches_that_differ_otherwise_are_not(other: dict[str, Any]) -> None:
    assert join([{"x": torch.zeros(2, 3), "scale": 2}, other]) is None


def test_items_travel_with_a_batch_where_they_are_counted() -> None:
    batch = {"x": torch.zeros(2, 3)}
    assert set(with_items(batch, None)) == {"x"}
    assert with_items(batch, 5)[ITEMS] == 5

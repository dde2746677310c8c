"""A disk behind the host: the same training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fit.cases import CASES, assert_same_parameters, assert_same_training, build_training, take_step
from tonnage.fit.modules import find_blocks
from tonnage.fit.stepping.parameter_step import parameter_steps
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.eight_bit_states import EightBitStates
from tonnage.fit.techniques.nvme import DiskStep, Nvme
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.units import KIB


def names_of(case: str) -> tuple[str, ...]:
    return tuple(find_blocks(CASES[case]()[0]))


def on_disk(directory: Path, what: str, case: str, **settings: Any) -> Nvme:
    blocks = names_of(case) if what != "states" else ()
    sizes = {"staging_bytes": 64 * KIB, "window_bytes": 0, "minimum_bytes": 0}
    return Nvme(directory=str(directory), what=what, blocks=blocks, **{**sizes, **settings})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["weights", "activations", "states"])
def test_training_is_the_plain_one(tmp_path: Path, what: str, case: str) -> None:
    assert_same_training(CASES[case], on_disk(tmp_path, what, case), steps=4, clip_norm=1.0)
    assert list(tmp_path.iterdir()) == []


def test_weights_beside_recompute_and_a_step_in_backward(tmp_path: Path) -> None:
    recompute = Recompute(modes=dict.fromkeys(names_of("llama"), "block"))
    assert_same_training(CASES["llama"], on_disk(tmp_path, "weights", "llama"), recompute, StepInBackward(), steps=4)


def test_states_beside_streamed_weights_and_a_step_in_backward(tmp_path: Path) -> None:
    streaming = WeightStreaming(blocks=names_of("llama"))
    assert_same_training(CASES["llama"], on_disk(tmp_path, "states", "llama"), streaming, StepInBackward(), steps=4)


def test_eight_bit_states_on_the_disk_are_those_of_the_device(tmp_path: Path) -> None:
    plain, fitted = (build_training(CASES["llama"]) for _ in range(2))
    for training in (plain, fitted):
        EightBitStates().apply(training)
    undo = on_disk(tmp_path, "states", "llama").apply(fitted)
    for step in range(3):
        take_step(plain, step), take_step(fitted, step)
    assert_same_parameters(plain.model, fitted.model, 0)
    undo()
    take_step(plain, 3), take_step(fitted, 3)
    assert_same_parameters(plain.model, fitted.model, 0)


def test_state_dicts_of_the_optimizer_are_plain(tmp_path: Path) -> None:
    plain, fitted = (build_training(CASES["gpt2"]) for _ in range(2))
    take_step(plain, 0)
    on_disk(tmp_path, "states", "gpt2").apply(fitted)
    take_step(fitted, 5)
    fitted.model.load_state_dict(plain.model.state_dict())
    fitted.optimizer.load_state_dict(plain.optimizer.state_dict())
    for step in (1, 2):
        take_step(plain, step), take_step(fitted, step)
    assert_same_parameters(plain.model, fitted.model, 1e-10)
    other = build_training(CASES["gpt2"])
    other.model.load_state_dict(fitted.model.state_dict())
    other.optimizer.load_state_dict(fitted.optimizer.state_dict())
    take_step(plain, 3), take_step(other, 3)
    assert_same_parameters(plain.model, other.model, 1e-10)


def test_loading_states_again_and_again_takes_no_more_room(tmp_path: Path) -> None:
    training = build_training(CASES["llama"])
    on_disk(tmp_path, "states", "llama").apply(training)
    step = parameter_steps(training.optimizer).function
    assert isinstance(step, DiskStep)
    take_step(training, 0)
    states = training.optimizer.state_dict()
    training.optimizer.load_state_dict(states)
    file_bytes = step.space.file_bytes
    for _ in range(3):
        training.optimizer.load_state_dict(states)
        take_step(training, 1)
    assert step.space.file_bytes <= 2 * file_bytes


def test_a_directory_or_a_wish_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(CASES["llama"])
    with pytest.raises(NotApplicable, match="no directory"):
        on_disk(tmp_path / "nothing", "states", "llama").apply(training)
    with pytest.raises(NotApplicable, match="asked to keep 'gradients'"):
        on_disk(tmp_path, "gradients", "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=1024))
    with pytest.raises(NotApplicable, match=r"which has 1\.00 KiB"):
        on_disk(tmp_path, "weights", "llama").apply(training)
    assert type(training.stepper) is Stepper
    assert not any(parameter.isnan().any() for parameter in training.model.parameters())


def test_order_and_conflicts_are_those_of_what_is_kept(tmp_path: Path) -> None:
    orders = {what: on_disk(tmp_path, what, "llama").order for what in ("weights", "activations", "states")}
    assert orders == {"weights": 35, "activations": 50, "states": 80}
    assert "host-states" in on_disk(tmp_path, "states", "llama").conflicts

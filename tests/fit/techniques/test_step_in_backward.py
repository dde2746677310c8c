from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from fit.cases import CASES, Case, assert_same_parameters, assert_same_training, build_training, gradients, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.stepping import parameter_step
from tonnage.fit.stepping.backward_stepper import BackwardBroken
from tonnage.fit.stepping.parameter_step import PlainStep
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.step_in_backward import StepInBackward


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_trains_as_the_plain_step_does(build: Callable[[], Case]) -> None:
    assert_same_training(build, StepInBackward())


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_with_small_parameters_stepped_together_it_trains_the_same(
    build: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_step, "_SMALL_SHARE", 4)
    assert_same_training(build, StepInBackward())


def test_norms_and_biases_are_stepped_once_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = PlainStep.step_all

    def counted(self: PlainStep, steps: Any) -> None:
        taken.append(len(steps))
        plain(self, steps)

    monkeypatch.setattr(PlainStep, "step_all", counted)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    batch = torch.randn(2, 64, dtype=torch.float64)
    training = build_training(lambda: (model, batch, lambda model, x: model(x).square().mean()))
    monkeypatch.setattr(parameter_step, "_SMALL_SHARE", 32)
    StepInBackward().apply(training)
    take_step(training, 0)
    assert taken == [1, 1, 4]
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_no_gradient_outlives_its_step() -> None:
    training = build_training(CASES["gpt2"])
    alive: list[int] = []
    StepInBackward().apply(training)
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in training.model.parameters()))
        )
    take_step(training, 0)
    assert len(alive) == sum(1 for _ in training.model.parameters())  # the tied weight once
    assert set(alive) == {0}


def test_on_the_virtual_gpu_only_one_gradient_is_there_at_a_time() -> None:
    found = peaks("step-in-backward")
    gradient_bytes = 4 * 1024 * 1024
    assert found["plain"] > 16 * gradient_bytes
    assert found["fitted"] < 3 * gradient_bytes


def test_between_steps_backward_only_makes_gradients() -> None:
    plain, fitted = build_training(CASES["llama"]), build_training(CASES["llama"])
    StepInBackward().apply(fitted)
    expected, found = gradients(plain)[1], gradients(fitted)[1]
    torch.testing.assert_close(found, expected)
    assert_same_parameters(plain.model, fitted.model, 0.0)


def test_schedules_and_hooks_see_one_step_each() -> None:
    training = build_training(CASES["dropout"])
    schedule = LinearLR(training.optimizer)
    calls: list[object] = []
    training.optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments))
    StepInBackward().apply(training)
    take_step(training, 0)
    schedule.step()  # an error in our tests where it thinks that no step was taken
    assert len(calls) == 1


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


def test_an_error_midway_says_what_was_stepped() -> None:
    training = build_training(CASES["dropout"])
    model = training.model
    model.embed.register_forward_hook(lambda module, inputs, output: RaisesInBackward.apply(output))
    StepInBackward().apply(training)
    before = model.embed.weight.detach().clone()
    with pytest.raises(BackwardBroken, match=r"when 20 of 22 parameters were already stepped: blocks\.0\.norm\.weight"):
        take_step(training, 0)
    training.stepper.abandon()
    assert torch.equal(model.embed.weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_before_the_first_step_is_left_as_it_is() -> None:
    training = build_training(CASES["dropout"])
    training.model.head.register_forward_hook(lambda module, inputs, output: RaisesInBackward.apply(output))
    StepInBackward().apply(training)
    with pytest.raises(ValueError, match="no gradient today"):
        take_step(training, 0)


def test_refuses_accumulation_and_clipping() -> None:
    with pytest.raises(NotApplicable, match="norm of all gradients"):
        StepInBackward().apply(build_training(CASES["dropout"], clip_norm=1.0))
    training = build_training(CASES["dropout"])
    StepInBackward().apply(training)
    with pytest.raises(NotApplicable, match="2 micro-batches"):
        training.stepper.begin(2)


def test_undo_leaves_nothing_behind() -> None:
    training = build_training(CASES["llama"])
    before = training.stepper
    undo = StepInBackward().apply(training)
    take_step(training, 0)
    undo()
    assert training.stepper is before
    assert all(not parameter._post_accumulate_grad_hooks for parameter in training.model.parameters())


class _Half(torch.autograd.Function):
    """Takes two parameters and gives a gradient to one."""

    @staticmethod
    def forward(ctx: Any, used: Tensor, unused: Tensor) -> Tensor:
        return used.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.expand(3), None


def test_a_parameter_that_a_function_takes_without_a_gradient_stays() -> None:
    training = build_training(
        lambda: (nn.ParameterList([torch.ones(3), torch.ones(3)]), None, lambda m, _: _Half.apply(*m))
    )
    StepInBackward().apply(training)
    take_step(training, 0)
    used, unused = training.model
    assert (used < 1).all()
    assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
    assert used.grad is None

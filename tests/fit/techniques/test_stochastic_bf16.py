"""BF16 alone: half the bytes, training still learns, and state dicts are those of the model that was given."""

import copy
from typing import Any

import pytest
import torch

from fit.cases import CASES, build_training, take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.stochastic_bf16 import StochasticBf16
from tonnage.fit.training import Training


def _training(case: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Training:
    training = build_training(CASES[case], dtype=dtype, **settings)
    training.sample = {name: v.to(dtype) if v.is_floating_point() else v for name, v in training.sample.items()}
    return training


@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls_as_in_plain_training(case: str) -> None:
    plain, fitted = _training(case), _training(case)
    StochasticBf16().apply(fitted)
    for step in range(12):
        expected, found = take_step(plain, step), take_step(fitted, step)
    first = take_step(_training(case), 0)
    assert first - found > 0.5 * (first - expected) > 0


def test_rounding_to_nearest_would_not_learn() -> None:
    """At a learning rate whose updates are below the spacing of BF16, only stochastic rounding moves large weights."""
    plain, fitted = (_training("llama", torch.bfloat16) for _ in range(2))
    StochasticBf16().apply(fitted)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters() if "norm" in name}
    for training in (plain, fitted):
        training.optimizer.param_groups[0].update(lr=1e-4, weight_decay=0.0)
        for step in range(5):
            take_step(training, step)
    assert all(torch.equal(plain.model.get_parameter(name), old) for name, old in before.items())
    assert not any(torch.equal(fitted.model.get_parameter(name), old) for name, old in before.items())


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_everything_is_bf16_under_it_and_as_before_after_undo(clip_norm: float | None) -> None:
    training = _training(clip_norm=clip_norm)
    take_step(training, 0)
    undo = StochasticBf16().apply(training)
    take_step(training, 1)
    states = [state[name] for state in training.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in (*training.model.parameters(), *states)} == {torch.bfloat16}
    trained = [parameter.detach().clone() for parameter in training.model.parameters()]
    undo()
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in training.optimizer.state.values()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), trained, strict=True))
    take_step(training, 2)


def test_state_dicts_have_the_types_of_the_plain_ones_and_training_goes_on_from_them() -> None:
    plain, first, second = (_training() for _ in range(3))
    take_step(plain, 0)
    StochasticBf16().apply(first)
    take_step(first, 0)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    assert _types(saved) == _types((plain.model.state_dict(), plain.optimizer.state_dict()))
    plain.model.load_state_dict(saved[0])
    plain.optimizer.load_state_dict(saved[1])
    StochasticBf16().apply(second)
    second.model.load_state_dict(plain.model.state_dict())
    second.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert torch.equal(take_step(first, 1), take_step(second, 1))
    assert torch.equal(take_step(first, 2), take_step(second, 2))


def _types(saved: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    model, optimizer = saved
    states = {i: {name: value.dtype for name, value in state.items()} for i, state in optimizer["state"].items()}
    return {name: (value.dtype, value.shape) for name, value in model.items()}, states


def test_it_stands_beside_the_step_in_backward() -> None:
    training = _training()
    undo_rounding = StochasticBf16().apply(training)
    undo_backward = StepInBackward().apply(training)
    losses = [take_step(training, step) for step in range(10)]
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in training.model.parameters())
    undo_backward()
    undo_rounding()


@pytest.mark.parametrize(
    ("optimizer_class", "options", "reason"),
    [
        (torch.optim.RMSprop, {}, "RMSprop"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
    ],
)
def test_it_refuses_what_it_cannot_step(optimizer_class: Any, options: dict[str, Any], reason: str) -> None:
    training = _training()
    training.optimizer = optimizer_class(training.model.parameters(), **options)
    with pytest.raises(NotApplicable, match=reason):
        StochasticBf16().apply(training)
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}


def test_it_refuses_fp64() -> None:
    with pytest.raises(NotApplicable, match="FP32 or BF16"):
        StochasticBf16().apply(build_training(CASES["llama"]))

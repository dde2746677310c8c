from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LinearLR

from tonnage.fit.stepping.parameter_step import (
    Group,
    State,
    Step,
    parameter_steps,
    why_not_in_pieces,
    why_not_one_by_one,
)
from tonnage.fit.technique import NotApplicable

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {}),
]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03}]


def set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def step_one_by_one(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    steps = parameter_steps(optimizer)
    for parameter in reversed(parameters):
        assert parameter.grad is not None
        steps.step(parameter, parameter.grad)
        assert parameter.grad is None


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_one_by_one_is_all_at_once(kind: type[Optimizer], options: dict[str, Any]) -> None:
    whole, parts = weights(), weights()
    at_once = kind(two_groups(whole), lr=0.01, **options)
    one_by_one = kind(two_groups(parts), lr=0.01, **options)
    schedules = [LinearLR(optimizer, total_iters=4) for optimizer in (at_once, one_by_one)]
    for step in range(10):
        set_gradients(whole, step)
        set_gradients(parts, step)
        at_once.step()
        step_one_by_one(one_by_one, parts)
        one_by_one.step()  # without gradients it only tells the schedule
        for schedule in schedules:
            schedule.step()
        if step == 5:
            one_by_one.load_state_dict(deepcopy(at_once.state_dict()))
    for expected, found in zip(whole, parts, strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(one_by_one.state_dict(), at_once.state_dict(), rtol=0, atol=0)


def test_an_optimizer_with_a_hook_before_its_step_is_stepped_whole() -> None:
    """Such a hook clips gradients by value, say, and would see none."""
    optimizer = torch.optim.AdamW(weights())
    handle = optimizer.register_step_pre_hook(lambda *arguments: None)
    assert "hook before its step" in (why_not_one_by_one(optimizer) or "")
    handle.remove()
    assert why_not_one_by_one(optimizer) is None


def test_a_parameter_added_later_is_found() -> None:
    first, second, third = weights()
    optimizer = torch.optim.SGD([first], lr=1.0)
    parameter_steps(optimizer).step(first, torch.ones_like(first))
    optimizer.add_param_group({"params": [second, third], "lr": 0.5})
    before = third.detach().clone()
    parameter_steps(optimizer).step(third, torch.ones_like(third))
    torch.testing.assert_close(third.detach(), before - 0.5)


def test_another_step_takes_the_place_and_gives_it_back() -> None:
    parameter = weights()[0]
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = parameter_steps(optimizer)
    plain = steps.function
    finished: list[bool] = []

    class Doubled(Step):
        def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
            plain(parameter, 2 * gradient, state, group)

    undo = steps.replace(Doubled(), finish=lambda: finished.append(True))
    before = parameter.detach().clone()
    steps.step(parameter, torch.ones_like(parameter))
    steps.finish()
    torch.testing.assert_close(parameter.detach(), before - 2)
    undo()
    steps.finish()
    assert steps.function is plain
    assert finished == [True, True]  # once by hand, once before the place was given back


class WholeStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class NamedSgd(torch.optim.SGD):
    """A class of one's own that steps as its parent does."""


def test_refuses_what_sees_all_parameters_at_once() -> None:
    with pytest.raises(NotApplicable, match="line through all parameters"):
        parameter_steps(LBFGS(weights()))
    with pytest.raises(NotApplicable, match=r"the step of WholeStep is not one of torch\.optim's"):
        parameter_steps(WholeStep(weights()))
    parameter_steps(NamedSgd(weights()))


def test_matrix_optimizers_are_not_stepped_in_pieces() -> None:
    assert "whole matrix" in str(why_not_in_pieces(torch.optim.Muon(weights())))
    assert why_not_in_pieces(torch.optim.AdamW(weights())) is None

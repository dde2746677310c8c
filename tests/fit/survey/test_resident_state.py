"""An optimizer asked on a small scale: its own training sees nothing of it. What a card holds is in `virtual_limits.py`."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

from tonnage.fit.survey.resident_state import _alone, launch_times


@pytest.fixture
def model() -> nn.Linear:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def step_alone(optimizer: Optimizer) -> Optimizer:
    probe = nn.Parameter(torch.zeros(2, 2))
    probe.grad = torch.ones_like(probe)
    small = _alone(optimizer, probe)
    small.step()
    assert set(small.state) == {probe}, "it was this one that took the step"
    return small


def test_a_scheduler_s_optimizer_is_not_stepped_in_its_place(model: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ConstantLR(optimizer)
    before = model.weight.clone()
    step_alone(optimizer)
    assert torch.equal(model.weight, before)
    assert not optimizer.state


def test_nobody_s_hooks_are_called(model: nn.Linear) -> None:
    optimizer, called = torch.optim.AdamW(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step_alone(optimizer)
    assert not called
    optimizer.step()
    assert called == ["before", "after"]


class _OnTheHost:
    """Of a meter, what finding out about launches asks for."""

    device, virtual = torch.device("cpu"), False


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
def test_the_host_s_time_for_a_step_is_found_on_a_parameter_of_its_own(kind: type[Optimizer], model: nn.Linear) -> None:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    found = launch_times(optimizer, _OnTheHost())  # type: ignore[arg-type]
    assert found["launch_s"] > 0
    assert found["moved_launch_s"] > 0
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_an_optimizer_that_is_not_stepped_in_pieces_has_no_such_times(kind: type[Optimizer], model: nn.Linear) -> None:
    assert launch_times(kind(model.parameters()), _OnTheHost()) == {}  # type: ignore[arg-type, call-arg]

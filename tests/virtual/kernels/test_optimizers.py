"""Optimizer steps and gradient clipping against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

from tonnage.virtual.kernels.optimizers import chunks

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    parameters = [torch.empty(shape, device="cuda", requires_grad=True) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def test_norms_of_many_tensors_begin_with_their_chunks(events: Events) -> None:
    tensors = [torch.empty(1024, 1024, device="cuda") for _ in range(2)]
    assert chunks(tensors) == 16
    assert events(lambda: torch._foreach_norm(tensors)) == "+128 +4 +4 -0"
    assert events(lambda: torch._foreach_max(tensors)) == "+4 +4 +128 -2"


def test_clipping(events: Events) -> None:
    parameters = _parameters((1024, 1024), (1024, 1024))
    made = events(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    assert made == "+128 +4 +4 -0 +8 +4 -3 -2 -1 +4 +4 +4 -6 -5 +4 -7 -8"


def test_a_step_of_adam_holds_one_denominator_for_each_parameter(events: Events) -> None:
    optimizer = torch.optim.AdamW(_parameters((64,), (33, 65), (768, 768)), foreach=True)
    optimizer.step()
    assert events(optimizer.step) == "+256 +8580 +2359296 -2 -1 -0"


def test_a_loop_of_adam_holds_one_at_a_time(events: Events) -> None:
    optimizer = torch.optim.AdamW(_parameters((64,), (33, 65)), foreach=False)
    optimizer.step()
    assert events(optimizer.step) == "+256 +256 -0 +8580 +8580 -2 -1 -3"


def test_a_fused_step_allocates_nothing(events: Events) -> None:
    optimizer = torch.optim.AdamW(_parameters((64,), (33, 65)), fused=True)
    optimizer.step()
    assert events(optimizer.step) == ""


def test_a_number_to_a_power_on_the_device(events: Events) -> None:
    step = torch.empty((), device="cuda")
    assert events(lambda: 0.9**step) == "+4 +8 -1"

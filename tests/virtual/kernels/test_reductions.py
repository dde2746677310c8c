"""Reductions, scans, optimizer steps and gradient clipping against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

from tonnage.virtual.kernels.reductions import chunks

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_a_norm_over_all_stages_partial_results(events: Events) -> None:
    x = _empty(100_000, 3)
    assert events(lambda: torch.linalg.vector_norm(x, 2)) == "+4 +148 +4 -2 -1"


def test_a_sum_of_flags_casts_them_first(events: Events) -> None:
    x = _empty(33, 65, dtype=torch.bool)
    assert events(lambda: x.sum()) == "+8 +17160 -1"


def test_a_mean_of_a_million(events: Events) -> None:
    x = _empty(1024, 1024)
    assert events(lambda: x.mean(0)) == "+4096 +8388608 +32 -2 -1"


def test_small_reductions_allocate_their_result_alone(events: Events) -> None:
    x = _empty(33, 65)
    assert events(lambda: x.amax(1)) == "+132"


def test_known_values_are_reduced() -> None:
    x = torch.tensor([3, 9, 4], device="cuda")
    assert x.argmax().item() == 1
    assert x.argmin().item() == 0
    assert x.max(0).indices.item() == 1
    assert (x > 3).any().item() is True
    assert (x > 3).all().item() is False


def test_checks_of_unknown_values_hold() -> None:
    x = torch.rand(8, 8, device="cuda").sin() * 3  # of a sine nothing is assumed
    assert (x > 0).all().item() is True
    assert (x > 1).any().item() is False


def test_the_place_of_the_largest_is_a_place() -> None:
    x = torch.rand(64, 10, device="cuda")
    places = x.argmax(-1).tolist()
    assert all(0 <= place < 10 for place in places)
    assert len(set(places)) > 1


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

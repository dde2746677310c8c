"""Choosing, moving and random elements against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def test_where_casts_the_narrower_operand(events: Events) -> None:
    condition = torch.empty(33, 65, dtype=torch.bool, device="cuda")
    x, y = torch.empty(33, 65, dtype=torch.bfloat16, device="cuda"), torch.empty(33, 65, device="cuda")
    assert events(lambda: torch.where(condition, x, y)) == "+8580 +8580 -0"


def test_where_chooses_what_is_known() -> None:
    unknown, never = torch.rand(3, 1, device="cuda"), torch.zeros(3, 3, dtype=torch.bool, device="cuda")
    assert torch.where(never, unknown, -1e9).tolist() == [[-1e9] * 3] * 3


def test_rolling_goes_dimension_by_dimension(events: Events) -> None:
    x = torch.empty(4, 56, 56, 96, device="cuda")
    assert events(lambda: x.roll((-3, -3), (1, 2))) == "+4816896 +4816896 -0"


def test_the_backward_of_windows_walks_over_what_they_cover(events: Events) -> None:
    grad = torch.empty(33, 15, 8, device="cuda")
    assert events(lambda: torch.ops.aten.unfold_backward(grad, [33, 65], 1, 8, 4)) == "+8580 +512 -1"


def test_a_permutation_sorts_random_keys(events: Events) -> None:
    assert events(lambda: torch.randperm(5000, device="cuda")) == (
        "+40000 +8 -1 +40000 +20000 +20000 +70143 -5 -4 -3 -2"
    )


def test_a_permutation_is_one() -> None:
    assert sorted(torch.randperm(50, device="cuda").tolist()) == list(range(50))


def test_probabilities_are_read_in_float32(events: Events) -> None:
    p = torch.empty(7, dtype=torch.bfloat16, device="cuda")
    assert events(lambda: torch.bernoulli(p)) == "+14 +28 -1"


def test_normal_around_a_tensor(events: Events) -> None:
    mean = torch.empty(1024, 1024, device="cuda")
    assert events(lambda: torch.normal(mean, 1.0)) == "+4194304 +4194304 -1"
    assert events(lambda: torch.normal(mean, mean)) == ("+4 +512 +4 -2 -1 +1 -3 -0 +4194304 +4 +512 +4 -7 -6 +1 -8 -5")


def test_distributions_accept_values_that_nobody_knows() -> None:
    logits = torch.rand(64, 32, device="cuda")
    drawn = torch.distributions.Categorical(logits=logits).sample()
    assert drawn.max().item() < 32
    assert torch.distributions.Normal(logits, logits.exp()).rsample().shape == (64, 32)

"""Random tensors against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


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

"""Stochastic rounding is right in the mean, and the steps are torch.optim's apart from it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tonnage.fit.stepping import stochastic
from tonnage.fit.stepping.stochastic import round_stochastically, stochastic_step

_FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def _neighbours(value: float) -> tuple[float, float]:
    """The BF16 numbers just below and above in magnitude."""
    bits = torch.tensor([value], dtype=torch.float32).view(torch.int32)
    lower = bits & -(2**16)
    upper = lower + (2**16 if bits.item() != lower.item() else 0)
    return lower.view(torch.float32).item(), upper.view(torch.float32).item()


@given(value=_FINITE, seed=st.integers(0, 2**31))
def test_a_value_becomes_one_of_its_neighbours(value: float, seed: int) -> None:
    torch.manual_seed(seed)
    found = round_stochastically(torch.full((64,), value))
    assert found.dtype == torch.bfloat16
    assert set(found.tolist()) <= set(_neighbours(value))


@given(value=_FINITE.filter(lambda value: abs(value) > 1e-30), seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_the_mean_is_the_value(value: float, seed: int) -> None:
    torch.manual_seed(seed)
    count = 20_000
    mean = round_stochastically(torch.full((count,), value)).double().mean().item()
    lower, upper = _neighbours(value)
    # The spread of a mean of coin tosses is at most half a spacing over the root of their number; six of them.
    assert abs(mean - torch.tensor(value).item()) <= 3 * abs(upper - lower) / count**0.5 + 1e-12 * abs(value)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1])
def test_no_nan_is_rounded_into_a_number(bits: int) -> None:
    value = torch.tensor([bits] * 256, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(value).isnan().all()


def test_infinities_and_zeros_stay() -> None:
    values = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    found = round_stochastically(values.repeat(256)).reshape(256, 4)
    assert torch.equal(found.float(), values.expand(256, 4))
    assert found[:, 3].signbit().all()


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("chunk_elements", [5, 1000])
def test_in_fp32_nothing_is_rounded_and_the_step_is_torchs_own(
    kind: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochastic, "_CHUNK_ELEMENTS", chunk_elements)
    optimizer_class, options = OPTIMIZERS[kind]
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(4, 6))
    found = plain.detach().clone()
    optimizer, state = optimizer_class([plain], **options), {}
    for _ in range(4):
        plain.grad = torch.randn(4, 6)
        stochastic_step(found, plain.grad, state, optimizer.param_groups[0])
        optimizer.step()
        torch.testing.assert_close(found, plain.detach(), rtol=1e-5, atol=1e-6)
    assert set(state) == set(optimizer.state[plain])


def _mean_of_steps(parameter: Tensor, gradient: Tensor, group: dict[str, Any], repeats: int) -> Tensor:
    many, slopes = parameter.repeat(repeats, 1), gradient.repeat(repeats, 1)
    stochastic_step(many, slopes, {}, group)
    return many.double().mean(dim=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_far_below_the_spacing_are_kept_in_the_mean(kind: str) -> None:
    optimizer_class, options = OPTIMIZERS[kind]
    options = {**options, "lr": 1e-4, "weight_decay": 0.0}
    start = torch.full((8,), 1.0, dtype=torch.bfloat16)
    gradient = torch.full((8,), 0.5, dtype=torch.bfloat16)
    exact = nn.Parameter(start.float())
    optimizer = optimizer_class([exact], **options)
    exact.grad = gradient.float()
    optimizer.step()
    torch.manual_seed(0)
    mean = _mean_of_steps(start, gradient, optimizer.param_groups[0], repeats=200_000)
    change = (exact.detach().double() - start.double()).mean()
    assert torch.allclose(mean - start.double(), change.expand(8), rtol=0.35, atol=0.0)


def test_tensors_that_lie_in_another_order_are_stepped_too() -> None:
    parameter = torch.randn(4, 6, dtype=torch.bfloat16).t()
    gradient = torch.ones(6, 4, dtype=torch.bfloat16)
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.0).param_groups[0]
    before = parameter.float()
    stochastic_step(parameter, gradient, {}, group)
    torch.testing.assert_close(parameter.float(), before - 1, rtol=0.02, atol=0.02)

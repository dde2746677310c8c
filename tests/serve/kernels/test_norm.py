"""Residual, norm and gates, plain: against the formulas, a row at a time in FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.pages import far
from tonnage.serve.kernels import add_norm, gelu_tanh_mul, silu_mul

sizes = given(rows=st.integers(0, 5), width=st.integers(1, 90), seed=st.integers(0, 99))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@settings(max_examples=30)
@sizes
def test_the_sum_and_its_norm(offset: float, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    total = hidden + residual
    found, kept = add_norm(hidden, residual, weight, 1e-5, offset=offset)
    assert kept is residual
    assert torch.equal(kept, total)
    for row, x in zip(found, total.double(), strict=True):
        assert far(row, x / (x @ x / width + 1e-5) ** 0.5 * (weight.double() + offset)) < 1e-6


def test_without_a_residual_the_hidden_state_becomes_it() -> None:
    hidden = torch.randn(3, 8)
    found, kept = add_norm(hidden, None, torch.ones(8), 1e-6)
    assert kept is hidden
    assert far(found, hidden / hidden.square().mean(-1, keepdim=True).add(1e-6).sqrt()) < 1e-6


def test_bf16_is_computed_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(4, 4096) * 100).bfloat16(), torch.randn(4096).bfloat16()
    found, _ = add_norm(hidden, None, weight, 1e-6)
    truth, _ = add_norm(hidden.double(), None, weight.double(), 1e-6)
    assert torch.equal(found, truth.float().bfloat16())


@settings(max_examples=30)
@sizes
def test_gates(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    gate, up = torch.randn(rows, width, dtype=torch.float64) * 5, torch.randn(rows, width, dtype=torch.float64)
    both = torch.cat((gate, up), dim=1)
    assert far(silu_mul(both), gate / (1 + (-gate).exp()) * up) < 1e-12
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert far(gelu_tanh_mul(both), gate * (1 + inner.tanh()) / 2 * up) < 1e-12

"""Normalisation against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tonnage.virtual.kernels.norms import gradient_parts

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", requires_grad=True)


def test_layer_norm_of_many_short_rows_sums_in_parts(events: Events) -> None:
    x, weight, bias = _leaf(100_000, 32), _leaf(32), _leaf(32)
    y = F.layer_norm(x, (32,), weight, bias)
    grad = torch.ones_like(y)
    made = events(lambda: torch.autograd.grad(y, (x, weight, bias), grad))
    assert made.startswith("+12800000 +128 +128 +400000 +400000 +128 -1 +128 -2 -4 -3")


def test_layer_norm_copies_what_is_not_contiguous(events: Events) -> None:
    x, weight = _leaf(4, 64, 100).transpose(1, 2), _leaf(64)
    assert events(lambda: F.layer_norm(x, (64,), weight, weight)) == "+102400 +102400 +1600 +1600 -0"


def test_layer_norm_backward_copies_its_gradient_last(events: Events) -> None:
    x, weight = _leaf(4, 100, 64), _leaf(64)
    y = F.layer_norm(x, (64,), weight, weight)
    grad = torch.empty(4, 64, 100, device="cuda").transpose(1, 2)
    made = events(lambda: torch.autograd.grad(y, (x, weight), grad))
    assert made.startswith("+102400 +256 +256 +102400 -3")


def test_rms_norm(events: Events) -> None:
    x, weight = _leaf(100_000, 32), _leaf(32)
    y = F.rms_norm(x, (32,), weight)
    grad = torch.ones_like(y)
    made = events(lambda: torch.autograd.grad(y, (x, weight), grad))
    assert made.startswith("+12800000 +128 +400000 +128 -1 -2")


def test_group_norm(events: Events) -> None:
    x, weight, bias = _leaf(2, 32, 16, 16), _leaf(32), _leaf(32)
    assert events(lambda: F.group_norm(x, 8, weight, bias)) == "+65536 +64 +64 +256 +256 -4 -3"
    y = F.group_norm(x, 8, weight, bias)
    grad = torch.ones_like(y)
    made = events(lambda: torch.autograd.grad(y, (x, weight, bias), grad))
    assert made.startswith("+65536 +128 +128 +256 +256 +64 +64 +256 -6 -5 -7 -4 -3")


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 14), st.integers(1, 200))
def test_parts_fill_the_grid_at_most(rows: int, width: int, sm_count: int) -> None:
    parts = gradient_parts(rows, width, sm_count)
    assert 1 <= parts <= max(1, rows) and parts * -(-width // 32) <= max(1 << 15, -(-width // 32))

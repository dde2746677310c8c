"""Losses and softmax against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_a_mean_square_keeps_the_storage_of_all_elements(events: Events) -> None:
    x, y = _empty(1024, 1024), _empty(1024, 1024)
    assert events(lambda: functional.mse_loss(x, y)) == "+4194304 +4194304 +512 +4 -3 -2 -1"
    assert functional.mse_loss(x, y).untyped_storage().nbytes() == 4194304


def test_binary_cross_entropy_copies_its_mean_over_the_losses(events: Events) -> None:
    x, y = _empty(7, dtype=torch.float16), _empty(7, dtype=torch.float16)
    assert events(lambda: torch.ops.aten.binary_cross_entropy(x, y)) == "+14 +2 -1"


def test_huber_drops_the_losses(events: Events) -> None:
    x, y = _empty(33, 65), _empty(33, 65)
    assert events(lambda: functional.huber_loss(x, y)) == "+8580 +4 -0"


def test_the_backward_of_softmax_holds_a_product(events: Events) -> None:
    x = _empty(2, 12, 512, 512).requires_grad_()
    y = x.softmax(-1)
    gradient = torch.empty_like(y)
    assert events(lambda: torch.autograd.grad(y, x, gradient)) == "+25165824 +25165824 -1"


def test_cross_entropy_of_transposed_logits_makes_them_contiguous(events: Events) -> None:
    x = _empty(100, 64, dtype=torch.float16).t().requires_grad_()
    y = torch.zeros(64, dtype=torch.int64, device="cuda")
    assert events(lambda: functional.cross_entropy(x, y)) == "+12800 +12800 -1 +2 +2"


def test_ctc(events: Events) -> None:
    x = _empty(50, 16, 20)
    targets, inputs, lengths = (torch.full(s, v, device="cuda") for s, v in (((16, 10), 1), ((16,), 50), ((16,), 10)))
    measured = "+128 +128 +128 +67200 +64 -1 -0 -2"
    assert events(lambda: torch.ops.aten._ctc_loss(x, targets, inputs.tolist(), lengths.tolist())) == measured


def test_a_loss_is_finite() -> None:
    loss = functional.mse_loss(torch.rand(4, 4, device="cuda"), torch.rand(4, 4, device="cuda"))
    assert torch.isfinite(loss).item() is True
    assert torch.isnan(loss).item() is False
    assert torch.isinf(loss).item() is False

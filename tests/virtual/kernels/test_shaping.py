"""Choosing and moving elements against rows measured on an H200 with torch 2.11."""

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

"""Pooling against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _channels_last(*shape: int) -> torch.Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, device="cuda").contiguous(memory_format=layout).requires_grad_()


def test_adaptive_maxima_of_channels_last_go_through_copies(events: Events) -> None:
    x = _channels_last(32, 512, 7, 7)
    got = events(lambda: functional.adaptive_max_pool2d(x, 7, return_indices=True))
    assert got == "+3211264 +6422528 +3211264 +6422528 +3211264 -4 -3 -2"


def test_an_output_of_one_place_is_contiguous_already(events: Events) -> None:
    x = _channels_last(8, 64, 112, 112)
    got = events(lambda: functional.adaptive_max_pool2d(x, 1, return_indices=True))
    assert got == "+2048 +4096 +25690112 -2"


def test_contiguous_input_is_pooled_without_copies(events: Events) -> None:
    x = torch.empty(8, 64, 112, 112, device="cuda")
    assert events(lambda: functional.adaptive_max_pool2d(x, 1, return_indices=True)) == "+2048 +4096"


def test_three_dimensions_copy_before_or_after_the_output(events: Events) -> None:
    x = _channels_last(2, 8, 16, 17, 18)
    assert events(lambda: functional.adaptive_avg_pool3d(x, (1, 2, 3))) == "+313344 +384 -0"
    assert events(lambda: functional.avg_pool3d(x, 3, 2, 1)) == "+41472 +313344 -1"

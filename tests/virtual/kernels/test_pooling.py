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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("pool", [functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d])
def test_the_gradient_of_a_sum_is_copied(pool: Callable[..., torch.Tensor], channels_last: bool) -> None:
    """As torch's own host code does it over the stand-in libraries."""
    x = _channels_last(2, 64, 64, 64) if channels_last else torch.empty(2, 64, 64, 64, device="cuda").requires_grad_()
    pooled = pool(x, 8)
    copy_bytes = 0 if channels_last and pool is functional.adaptive_avg_pool2d else pooled.numel() * 4
    total = pooled.sum()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total.backward()
    assert torch.cuda.max_memory_allocated() - before == 512 + x.numel() * 4 + copy_bytes

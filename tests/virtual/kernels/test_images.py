"""Pooling, resizing, `unfold` and `fold` against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, last: bool = False) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, device="cuda").contiguous(memory_format=layout)


def test_few_channels_last_are_resized_through_copies(events: Events) -> None:
    x = _empty(1, 3, 224, 224, last=True)
    assert events(lambda: functional.interpolate(x, scale_factor=2)) == "+2408448 +2408448 +602112 -2 -1"


def test_enough_channels_have_a_kernel_of_their_own(events: Events) -> None:
    x = _empty(2, 8, 32, 32, last=True)
    assert events(lambda: functional.interpolate(x, scale_factor=2)) == "+262144"


def test_antialiasing_always_copies_channels_last(events: Events) -> None:
    x = _empty(2, 8, 32, 32, last=True)
    got = events(lambda: functional.interpolate(x, size=(20, 21), mode="bilinear", antialias=True))
    assert got == "+26880 +26880 +65536 -2 -1"


def test_unfold_keeps_the_bytes_of_its_input_where_it_needs_fewer(events: Events) -> None:
    x = _empty(4, 64, 14, 14)
    assert events(lambda: functional.unfold(x, 4, stride=4)) == "+200704"
    columns = functional.unfold(x, 4, stride=4)
    assert columns.shape == (4, 1024, 9)
    assert columns.untyped_storage().nbytes() == 200704


def test_fold_keeps_the_bytes_of_its_columns(events: Events) -> None:
    columns = _empty(2, 72, 900)
    assert events(lambda: functional.fold(columns, (32, 32), 3)) == "+518400"
    assert functional.fold(columns, (32, 32), 3).shape == (2, 8, 32, 32)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("sizes", [(32, 48), (8, 32, 48)])
def test_samples_on_a_grid(sizes: tuple[int, ...], align_corners: bool) -> None:
    images = torch.empty(2, 4, *sizes, device="cuda", requires_grad=True)
    theta = torch.empty(2, len(sizes), len(sizes) + 1, device="cuda", requires_grad=True)
    grid = F.affine_grid(theta, [2, 4, *[16] * len(sizes)], align_corners=align_corners)
    sampled = F.grid_sample(images, grid, align_corners=align_corners)
    assert sampled.shape == (2, 4, *[16] * len(sizes))
    sampled.sum().backward()
    assert images.grad is not None and theta.grad is not None
    assert images.grad.shape == images.shape


def test_cudnn_samples_into_contiguous_memory(events: Events) -> None:
    images, grid = _empty(2, 4, 32, 32, last=True), torch.empty(2, 16, 16, 2, device="cuda")
    assert events(lambda: torch.ops.aten.cudnn_grid_sampler(images, grid)) == "+32768 +8192 -0"
    both = events(lambda: torch.ops.aten.cudnn_grid_sampler_backward(images, grid, _empty(2, 4, 16, 16)))
    assert both == "+8192 +32768 +32768 +4096 -1 -0"  # the first is the gradient that the test makes


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

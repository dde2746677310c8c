"""Batch normalisation against rows measured on an H200 with torch 2.11 and cuDNN 9.19."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tonnage.virtual.kernels.norms import MAX_BLOCK, MAX_ROWS_OF_BLOCKS, reduction_grid

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="cuda").contiguous(memory_format=layout).requires_grad_()


def test_cudnn_takes_contiguous_input_without_a_workspace(events: Events) -> None:
    layer, x = nn.BatchNorm2d(64).cuda(), _empty(8, 64, 32, 32)
    assert events(lambda: layer(x)) == "+2097152 +256 +256"


def test_cudnn_needs_partial_sums_where_channels_are_last(events: Events) -> None:
    layer, x = nn.BatchNorm2d(64).cuda(), _empty(8, 64, 32, 32, last=True)
    assert events(lambda: layer(x)) == "+2097152 +256 +256 +67124 -3"
    y = layer(x)
    gradient = torch.empty_like(y)
    assert events(lambda: torch.autograd.grad(y, x, gradient)).startswith("+2097152 +256 +256 +45092 -3")


def test_pytorch_s_kernel_hands_partial_results_between_blocks(events: Events) -> None:
    layer, x = nn.BatchNorm2d(64).cuda().bfloat16(), _empty(256, 64, 8, 8, dtype=torch.bfloat16, last=True)
    assert events(lambda: layer(x)) == "+2097152 +256 +256 +65536 +8 -4 -3"


def test_without_channels_last_pytorch_s_backward_is_fused(events: Events) -> None:
    layer, x = nn.BatchNorm2d(64).cuda().bfloat16(), _empty(8, 64, 32, 32, dtype=torch.bfloat16)
    y = layer(x)
    gradient = torch.empty_like(y)
    assert events(lambda: torch.autograd.grad(y, [x, *layer.parameters()], gradient)) == "+1048576 +128 +128"


def test_an_evaluated_layer_gives_contiguous_gradients() -> None:
    layer, x = nn.BatchNorm2d(16).cuda().eval(), _empty(4, 16, 7, 9, last=True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert gradient.is_contiguous()


@given(length=st.integers(1, 10**8), channels=st.integers(1, 4096))
def test_a_grid_covers_the_channels_and_stays_in_bounds(length: int, channels: int) -> None:
    columns, rows = reduction_grid(length, channels)
    assert 1 <= rows <= MAX_ROWS_OF_BLOCKS
    assert -(-channels // MAX_BLOCK) <= columns <= channels

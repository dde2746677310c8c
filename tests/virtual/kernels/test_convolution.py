"""Convolutions against rows measured on an H200 with torch 2.11 and cuDNN 9.19."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tonnage.virtual.modelled import ModelledSession as Session

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="cuda").contiguous(memory_format=layout).requires_grad_()


def test_a_contiguous_convolution_turns_its_input_and_weight_in_the_workspace(events: Events) -> None:
    x, w = _empty(8, 64, 56, 56), _empty(64, 64, 3, 3)
    assert events(lambda: functional.conv2d(x, w, padding=1)) == "+6422528 +6570000 -1"


def test_channels_last_needs_no_copies(events: Events) -> None:
    x, w = _empty(8, 64, 56, 56, last=True), _empty(64, 64, 3, 3, last=True)
    assert events(lambda: functional.conv2d(x, w, padding=1)) == "+6422528 +131 -1"
    assert functional.conv2d(x, w, padding=1).is_contiguous(memory_format=torch.channels_last)


def test_the_backward_makes_each_gradient_with_a_workspace_of_its_own(events: Events) -> None:
    x, w = _empty(8, 64, 56, 56), _empty(64, 64, 3, 3)
    y = functional.conv2d(x, w, padding=1)
    gradient = torch.empty_like(y)
    got = events(lambda: torch.autograd.grad(y, (x, w), gradient))
    assert got == "+6422528 +12992528 -1 +147456 +15057575 -3"


def test_a_weight_in_the_other_layout_decides_the_output_s_and_copies_the_input(events: Events) -> None:
    x, w = _empty(2, 16, 33, 32), _empty(32, 16, 3, 3, last=True)
    assert events(lambda: functional.conv2d(x, w)) == "+135168 +238080 -0"
    assert functional.conv2d(x, w).is_contiguous(memory_format=torch.channels_last)


def test_depthwise_kernels_of_pytorch_need_nothing(events: Events) -> None:
    x, w = _empty(16, 96, 56, 56), _empty(96, 1, 7, 7)
    assert events(lambda: functional.conv2d(x, w, padding=3, groups=96)) == "+19267584"
    y = functional.conv2d(x, w, padding=3, groups=96)
    assert events(lambda: torch.autograd.grad(y, (x, w), torch.empty_like(y))).split()[1:] == [
        "+18816",
        "+19267584",
        "-0",
    ]


def test_a_transposed_convolution_is_the_gradient_of_one(events: Events) -> None:
    x, w = _empty(16, 512, 4, 4), _empty(512, 256, 4, 4)
    y = functional.conv_transpose2d(x, w, stride=2, padding=1)
    assert y.shape == (16, 256, 8, 8)
    to_x, to_w = torch.autograd.grad(y, (x, w), torch.empty_like(y))
    assert (to_x.shape, to_w.shape) == (x.shape, w.shape)


def test_only_the_gradient_that_is_wanted_is_made(events: Events) -> None:
    x, w = _empty(8, 3, 224, 224).detach(), _empty(64, 3, 7, 7)
    y = functional.conv2d(x, w, stride=2, padding=3)
    gradient = torch.empty_like(y)
    assert events(lambda: torch.autograd.grad(y, w, gradient)) == "+37632 +34872464 -1"


def test_the_search_for_the_fastest_engine_happens_once_and_is_large(events: Events, gpu: Session) -> None:
    x, w = _empty(8, 64, 56, 56), _empty(64, 64, 3, 3)
    torch.backends.cudnn.benchmark = True
    try:
        first, second = (events(lambda: functional.conv2d(x, w, padding=1)) for _ in range(2))
    finally:
        torch.backends.cudnn.benchmark = False
    assert first == "+6422528 +155860992 -1 +6570000 -2"
    assert second == "+6422528 +6570000 -1"


def test_a_plan_whose_workspace_does_not_fit_gives_way_to_one_without(gpu: Session) -> None:
    x, w = _empty(8, 64, 56, 56), _empty(64, 64, 3, 3)
    functional.conv2d(x, w, padding=1)  # loads cuDNN
    torch.cuda.empty_cache()
    room = 10 << 20  # for the output, and not for copies of both operands beside it
    taken = gpu.gpu.memory_bytes - gpu.device.allocator.outside_bytes - torch.cuda.memory_reserved() - room
    rest = torch.empty(taken - taken % (2 << 20), dtype=torch.uint8, device="cuda")
    for benchmark in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            assert functional.conv2d(x.detach(), w.detach(), padding=1).shape == x.shape
    del rest


def test_an_unmeasured_shape_is_said_to_be_assumed(gpu: Session) -> None:
    functional.conv2d(_empty(9, 37, 41, 43), _empty(53, 37, 3, 5))
    assert any(note.operator == "cudnn_convolution" for note in gpu.stand_ins.notes())


def test_an_empty_batch_allocates_nothing() -> None:
    assert functional.conv2d(_empty(0, 3, 8, 8), _empty(4, 3, 3, 3)).shape == (0, 4, 6, 6)

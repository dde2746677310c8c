"""Convolutions in the shapes that real networks use: cuDNN's workspaces appear as allocations and frees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F

from .spec import BF16, F16, F32, Case, case, t

# batch, in channels, side, out channels, kernel, stride, padding, dilation, groups
TWO_D = (
    (8, 3, 224, 64, 7, 2, 3, 1, 1), (8, 64, 56, 64, 1, 1, 0, 1, 1), (8, 64, 56, 64, 3, 1, 1, 1, 1), (8, 64, 56, 256, 1, 1, 0, 1, 1),
    (8, 256, 56, 128, 1, 1, 0, 1, 1), (8, 128, 56, 128, 3, 2, 1, 1, 1), (8, 256, 56, 512, 1, 2, 0, 1, 1), (8, 128, 28, 128, 3, 1, 1, 1, 1),
    (8, 256, 14, 256, 3, 1, 1, 1, 1), (8, 512, 7, 512, 3, 1, 1, 1, 1), (8, 2048, 7, 512, 1, 1, 0, 1, 1), (32, 64, 56, 64, 3, 1, 1, 1, 1),
    (64, 3, 224, 64, 7, 2, 3, 1, 1), (64, 256, 14, 256, 3, 1, 1, 1, 1), (32, 512, 7, 512, 3, 1, 1, 1, 1), (128, 64, 32, 64, 3, 1, 1, 1, 1),
    (128, 3, 32, 64, 3, 1, 1, 1, 1), (128, 256, 8, 512, 3, 2, 1, 1, 1), (64, 1, 28, 32, 3, 1, 0, 1, 1), (64, 32, 26, 64, 3, 1, 0, 1, 1),
    (16, 3, 224, 768, 16, 16, 0, 1, 1), (64, 3, 224, 384, 16, 16, 0, 1, 1), (8, 3, 224, 1024, 14, 14, 0, 1, 1), (2, 3, 336, 1024, 14, 14, 0, 1, 1),
    (8, 3, 224, 96, 4, 4, 0, 1, 1), (16, 96, 56, 96, 7, 1, 3, 1, 96), (16, 192, 28, 192, 7, 1, 3, 1, 192), (16, 384, 14, 384, 7, 1, 3, 1, 384),
    (16, 768, 7, 768, 7, 1, 3, 1, 768), (16, 96, 56, 192, 2, 2, 0, 1, 1), (16, 32, 112, 32, 3, 1, 1, 1, 32), (16, 96, 112, 96, 3, 2, 1, 1, 96),
    (16, 144, 56, 144, 5, 2, 2, 1, 144), (16, 672, 14, 672, 5, 1, 2, 1, 672), (32, 128, 56, 128, 3, 1, 1, 1, 32), (16, 480, 1, 20, 1, 1, 0, 1, 1),
    (1, 4, 64, 320, 3, 1, 1, 1, 1), (1, 320, 64, 320, 3, 1, 1, 1, 1), (2, 640, 32, 640, 3, 1, 1, 1, 1), (2, 1280, 16, 1280, 3, 1, 1, 1, 1),
    (2, 320, 64, 4, 3, 1, 1, 1, 1), (1, 128, 256, 128, 3, 1, 1, 1, 1), (4, 64, 128, 64, 3, 1, 1, 1, 1), (4, 3, 256, 64, 3, 1, 1, 1, 1),
    (2, 1024, 16, 512, 3, 1, 1, 1, 1), (4, 512, 33, 256, 3, 1, 12, 12, 1), (4, 64, 33, 64, 3, 1, 2, 2, 1), (4, 5, 31, 7, 3, 1, 1, 1, 1),
    (1, 1, 5, 1, 3, 1, 0, 1, 1), (2, 16, 17, 33, 5, 3, 2, 1, 1), (4, 32, 40, 64, 3, 1, 1, 1, 4), (8, 64, 64, 3, 4, 2, 1, 1, 1),
)  # fmt: skip
ONE_D = (
    (4, 1, 16000, 512, 10, 5, 0, 1, 1), (4, 512, 3199, 512, 3, 2, 0, 1, 1), (4, 512, 399, 512, 2, 2, 0, 1, 1), (4, 768, 49, 768, 128, 1, 64, 1, 16),
    (8, 80, 3000, 384, 3, 1, 1, 1, 1), (8, 384, 3000, 384, 3, 2, 1, 1, 1), (2, 1536, 1024, 1536, 4, 1, 3, 1, 1536), (8, 64, 100, 128, 1, 1, 0, 1, 1),
    (4, 32, 1000, 32, 3, 1, 4, 4, 1), (8, 256, 200, 512, 31, 1, 15, 1, 256),
)  # fmt: skip
THREE_D = ((2, 3, 16, 64, 3, 1, 1, 1, 1), (1, 16, 32, 32, 3, 1, 1, 1, 1), (2, 64, 14, 64, 1, 1, 0, 1, 1), (1, 32, 16, 64, 3, 2, 1, 1, 1), (1, 3, 32, 768, 16, 16, 0, 1, 1))
# batch, in channels, side, out channels, kernel, stride, padding, groups
TRANSPOSED = ((4, 64, 32, 32, 2, 2, 0, 1), (2, 100, 1, 512, 4, 1, 0, 1), (16, 512, 4, 256, 4, 2, 1, 1), (16, 128, 16, 64, 4, 2, 1, 1), (16, 64, 32, 3, 4, 2, 1, 1),
              (2, 512, 16, 256, 2, 2, 0, 1), (4, 32, 10, 32, 3, 1, 1, 32), (4, 5, 9, 7, 3, 2, 1, 1))  # fmt: skip


def cases(around: Callable[[], Any] = contextlib.nullcontext, dtypes: tuple[Any, ...] = (F32, BF16, F16)) -> Iterator[Case]:
    for dtype in dtypes:
        for shape in TWO_D:
            for layout in ("", "channels_last"):
                for bias in (True, False):
                    yield convolution(2, shape, dtype, layout, bias, around)
        for shape in TWO_D[::6]:
            yield convolution(2, shape, dtype, "", True, around, grad=False)
            yield convolution(2, shape, dtype, "", False, around, input_grad=False)
        for shape in ONE_D:
            for bias in (True, False):
                yield convolution(1, shape, dtype, "", bias, around)
        for shape in THREE_D:
            for layout in ("", "channels_last"):
                yield convolution(3, shape, dtype, layout, True, around)
        for n, c, side, out, kernel, stride, padding, groups in TRANSPOSED:
            for layout in ("", "channels_last"):
                yield case("conv_transpose2d", F.conv_transpose2d, t(n, c, side, side, dtype=dtype, layout=layout), t(c, out // groups, kernel, kernel, dtype=dtype),
                           t(out, dtype=dtype), stride=stride, padding=padding, groups=groups, around=around, note=layout)  # fmt: skip
            yield case("conv_transpose1d", F.conv_transpose1d, t(n, c, side, dtype=dtype), t(c, out // groups, kernel, dtype=dtype), t(out, dtype=dtype),
                       stride=stride, padding=padding, groups=groups, around=around)  # fmt: skip
        yield case("conv_transpose3d", F.conv_transpose3d, t(1, 32, 8, 8, 8, dtype=dtype), t(32, 16, 2, 2, 2, dtype=dtype), t(16, dtype=dtype), stride=2, around=around)
        yield case("conv2d", F.conv2d, t(2, 16, 32, 32, dtype=dtype), t(32, 16, 3, 3, dtype=dtype), padding="same", around=around, note="same")
        yield case("conv2d", F.conv2d, t(2, 16, 32, 32, dtype=dtype), t(32, 16, 4, 4, dtype=dtype), padding="same", around=around, note="same, even kernel")
        yield case("conv2d", F.conv2d, t(2, 16, 33, 32, dtype=dtype, layout="narrowed"), t(32, 16, 3, 3, dtype=dtype), around=around, note="narrowed")
        yield case("conv2d", F.conv2d, t(16, 33, 32, dtype=dtype), t(32, 16, 3, 3, dtype=dtype), around=around, note="unbatched")
        yield case("conv2d", F.conv2d, t(2, 16, 33, 32, dtype=dtype), t(32, 16, 3, 3, dtype=dtype, layout="channels_last"), around=around, note="weight channels_last")


def convolution(dims: int, shape: tuple[int, ...], dtype: Any, layout: str, bias: bool, around: Callable[[], Any], grad: bool = True,
                input_grad: bool = True) -> Case:  # fmt: skip
    n, c, side, out, kernel, stride, padding, dilation, groups = shape
    x = t(n, c, *[side] * dims, dtype=dtype, layout=layout, grad=grad and input_grad)
    weight = t(out, c // groups, *[kernel] * dims, dtype=dtype, layout=layout, grad=grad)
    operands = [x, weight] + ([t(out, dtype=dtype, grad=grad)] if bias else [])
    note = " ".join([layout, "" if grad else "no grad", "" if input_grad else "input without grad"]).strip()
    return case(f"conv{dims}d", (F.conv1d, F.conv2d, F.conv3d)[dims - 1], *operands, stride=stride, padding=padding, dilation=dilation, groups=groups,
                around=around, note=note)  # fmt: skip

"""Image operators: resizing, `unfold` and `fold`, and grid sampling.

Resizing copies channels-last tensors, except where a kernel for that layout exists. Columns are written into a tensor
that starts as large as the input, so the result may keep more bytes than it needs.
"""

from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.convolution import suggested_format
from tonnage.virtual.kernels.pooling import contiguous_like
from tonnage.virtual.kernels.registry import kernel, plain
from tonnage.virtual.session import active

# The channels-last kernels are used from this many channels on.
LEAST_CHANNELS = 4


def _through_copies(name: str, native_channels_last: bool, copies_result: bool = True) -> None:
    by_shape = plain(name)

    @kernel(name)
    def resize(source: Tensor, *rest: Any, **options: Any) -> Tensor:
        result: Tensor = by_shape(source, *rest, **options)
        takes_channels_last = suggested_format(source) == torch.channels_last and source.shape[1] >= LEAST_CHANNELS
        if not (native_channels_last and takes_channels_last):
            first = contiguous_like(result) if copies_result else None
            laid = source.contiguous()
            del laid, first
        return result


for _name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
    _through_copies(_name, native_channels_last=True)
    _through_copies(f"{_name}_backward", native_channels_last=True)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _through_copies(_name, native_channels_last=False)
    _through_copies(f"{_name}_backward", native_channels_last=False, copies_result=False)
_through_copies("upsample_bilinear2d_backward", native_channels_last=True)
_through_copies("upsample_bicubic2d_backward", native_channels_last=False, copies_result=False)


def _into_shape_of_input(x: Tensor, shape: list[int]) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    laid = x.contiguous()
    output.resize_(shape)
    del laid
    return output


@kernel("im2col")
def im2col(self: Tensor, kernel_size: list[int], dilation: list[int], padding: list[int], stride: list[int]) -> Tensor:
    """`unfold`: make one column for each window position."""
    places = 1
    for side, length, step, pad, move in zip(self.shape[-2:], kernel_size, dilation, padding, stride, strict=True):
        places *= (side + 2 * pad - step * (length - 1) - 1) // move + 1
    rows = self.shape[-3] * kernel_size[0] * kernel_size[1]
    return _into_shape_of_input(self, [*self.shape[:-3], rows, places])


@kernel("col2im")
def col2im(self: Tensor, output_size: list[int], kernel_size: list[int], *_: list[int]) -> Tensor:
    """`fold`, and the gradient of `unfold`."""
    channels = self.shape[-2] // (kernel_size[0] * kernel_size[1])
    return _into_shape_of_input(self, [*self.shape[:-2], channels, *output_size])


@kernel("cudnn_grid_sampler")
def cudnn_grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    """Sample bilinearly in float32 or float64, with zero padding and aligned corners."""
    active().device.use("cudnn")
    laid, grid = self.contiguous(), grid.contiguous()
    output = self.new_empty((self.shape[0], self.shape[1], *grid.shape[1:3]))
    del laid
    return output


@kernel("cudnn_grid_sampler_backward")
def cudnn_grid_sampler_backward(self: Tensor, grid: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate both gradients, whether or not both are needed."""
    laid, grid, grad = self.contiguous(), grid.contiguous(), grad_output.contiguous()
    result = laid.new_empty(laid.shape), grid.new_empty(grid.shape)
    del grad, laid
    return result

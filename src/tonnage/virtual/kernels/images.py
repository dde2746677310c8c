"""Image operators: pooling, resizing, `unfold` and `fold`, and grid sampling.

Many copy channels-last tensors, except where a kernel for that layout exists. Columns are written into a tensor that
starts as large as the input, so the result may keep more bytes than it needs. Poolings that are not here allocate only
their outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.convolution import suggested_format
from tonnage.virtual.kernels.registry import after_outputs, contiguous, kernel, plain
from tonnage.virtual.session import active

# The channels-last kernels are used from this many channels on.
LEAST_CHANNELS = 4


def _copies_both(result: Tensor, source: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [contiguous(result), contiguous(source)]


def _copies_unless_channels_last(result: Tensor, source: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    is_native = suggested_format(source) == torch.channels_last and source.shape[1] >= LEAST_CHANNELS
    return [] if is_native else _copies_both(result, source)


# What is copied once the outputs are allocated.
_COPIES: dict[str, Callable[..., list[Tensor]]] = {
    "adaptive_max_pool3d avg_pool3d reflection_pad2d upsample_bicubic2d_backward "
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": lambda _, source, *__, **___: [contiguous(source)],
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": _copies_both,
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d_backward upsample_nearest2d_backward "
    "_upsample_nearest_exact2d_backward": _copies_unless_channels_last,
    "adaptive_max_pool2d": lambda result, self, _: [contiguous(result[0]), contiguous(result[1]), contiguous(self)],
    # The gradient is scattered to the positions of the maxima.
    "adaptive_max_pool2d_backward": lambda result, grad, _, indices: [
        contiguous(grad), contiguous(indices), contiguous(result)
    ],
    # The gradient is copied to the input's layout, if it differs; one of any strides is read if the input is channels last.
    "max_pool2d_with_indices_backward avg_pool2d_backward": lambda _, grad, self, *__, **___: [
        grad.contiguous(memory_format=suggested_format(self))
    ],
    "_adaptive_avg_pool2d_backward": lambda _, grad, self: (
        [contiguous(grad)] if suggested_format(self) is torch.contiguous_format else []
    ),
}  # fmt: skip
for _names, _copies in _COPIES.items():
    after_outputs(*_names.split())(_copies)


@kernel("_adaptive_avg_pool3d")
def adaptive_avg_pool3d(self: Tensor, output_size: list[int]) -> Tensor:
    """Copy the input before the output is allocated."""
    laid = self.contiguous()
    output: Tensor = plain("_adaptive_avg_pool3d")(self, output_size)
    del laid
    return output


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

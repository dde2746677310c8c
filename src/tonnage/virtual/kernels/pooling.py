"""Pooling operators that copy non-contiguous operands. Others allocate only their outputs."""

from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.convolution import suggested_format
from tonnage.virtual.kernels.registry import kernel, plain


def contiguous_like(tensor: Tensor) -> Tensor | None:
    """Allocate a contiguous tensor for the result, if that is not contiguous itself."""
    return None if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@kernel("adaptive_max_pool2d")
def adaptive_max_pool2d(self: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    output, indices = plain("adaptive_max_pool2d")(self, output_size)
    first, second, laid = contiguous_like(output), contiguous_like(indices), self.contiguous()
    del laid, second, first
    return output, indices


@kernel("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad_output: Tensor, self: Tensor, indices: Tensor) -> Tensor:
    """Scatter the gradient to the positions of the maxima."""
    result: Tensor = plain("adaptive_max_pool2d_backward")(grad_output, self, indices)
    laid, places, first = grad_output.contiguous(), indices.contiguous(), contiguous_like(result)
    del first, places, laid
    return result


@kernel("adaptive_max_pool3d")
def adaptive_max_pool3d(self: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    """Copy a non-contiguous input; the outputs are contiguous."""
    output, indices = plain("adaptive_max_pool3d")(self, output_size)
    self.contiguous()
    return output, indices


@kernel("_adaptive_avg_pool3d")
def adaptive_avg_pool3d(self: Tensor, output_size: list[int]) -> Tensor:
    """Copy the input before the output is allocated."""
    laid = self.contiguous()
    output: Tensor = plain("_adaptive_avg_pool3d")(self, output_size)
    del laid
    return output


@kernel("avg_pool3d")
def avg_pool3d(self: Tensor, kernel_size: list[int], *rest: Any, **options: Any) -> Tensor:
    output: Tensor = plain("avg_pool3d")(self, kernel_size, *rest, **options)
    self.contiguous()
    return output


def _register_backward(name: str, channels_last: bool) -> None:
    """Register a pooling's backward: after the result, the gradient is copied to the input's layout if it differs.

    With `channels_last=False` the kernel reads a gradient of any strides if the input is channels last.
    """
    by_shape = plain(name)

    @kernel(name)
    def backward(grad_output: Tensor, self: Tensor, *others: Any, **options: Any) -> Tensor:
        result: Tensor = by_shape(grad_output, self, *others, **options)
        layout = suggested_format(self)
        if channels_last or layout is torch.contiguous_format:
            grad_output.contiguous(memory_format=layout)
        return result


_register_backward("max_pool2d_with_indices_backward", channels_last=True)
_register_backward("avg_pool2d_backward", channels_last=True)
_register_backward("_adaptive_avg_pool2d_backward", channels_last=False)

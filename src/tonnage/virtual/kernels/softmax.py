"""Softmax: the input is made contiguous, and backward first multiplies gradient and output into a temporary."""

from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain

LONGEST_FUSED, MOST_BYTES_FUSED = 1024, 4096


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _register(name: str) -> None:
    by_shape = plain(name)

    @kernel(name)
    def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result: torch.Tensor = by_shape(self, dim, half_to_float)
        _contiguous(self)
        return result


_register("_softmax")
_register("_log_softmax")


@kernel("_softmax_backward_data", "_softmax_backward_data.out")
def softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype, **out: torch.Tensor
) -> torch.Tensor:
    """Hold the product of gradient and output until the end."""
    by_shape = plain("_softmax_backward_data.out" if out else "_softmax_backward_data")
    result: torch.Tensor = by_shape(grad_output, output, dim, input_dtype, **out)
    product = grad_output * output
    _hold(product, output)
    return result


@kernel("_log_softmax_backward_data")
def log_softmax_backward(grad_output: torch.Tensor, output: torch.Tensor, *rest: Any) -> torch.Tensor:
    result: torch.Tensor = plain("_log_softmax_backward_data")(grad_output, output, *rest)
    _hold(grad_output, output)
    return result


def _hold(grad: torch.Tensor, output: torch.Tensor) -> None:
    grad = _contiguous(grad)
    output = _contiguous(output)
    del output, grad


@kernel("_masked_softmax")
def masked_softmax(
    self: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    """Use one kernel if rows are short and the mask is contiguous, else a masked copy and a softmax."""
    result = torch.empty_like(self)
    if mask_type == 0 and self.dim() == 4 and mask.dim() == 2:
        mask = mask.expand(self.shape)
    place = self.dim() - 1 if dim is None else dim
    length = self.shape[place]
    fused = length <= LONGEST_FUSED and length * self.element_size() <= MOST_BYTES_FUSED and mask.is_contiguous()
    if fused and place == self.dim() - 1:
        return result
    if mask_type == 1:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1])
    return torch.softmax(self.masked_fill(mask, float("-inf")), place)

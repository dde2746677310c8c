"""Softmax: its input is made contiguous, and its backward multiplies gradient and output into a temporary first."""

import torch

from tonnage.virtual.kernels.registry import kernel, plain

aten = torch.ops.aten
LONGEST_FUSED, MOST_BYTES_FUSED = 1024, 4096


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


@kernel("_softmax")
def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Forward."""
    result: torch.Tensor = plain(aten._softmax.default)(self, dim, half_to_float)
    _contiguous(self)
    return result


@kernel("_log_softmax")
def log_softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Forward of the logarithm."""
    result: torch.Tensor = plain(aten._log_softmax.default)(self, dim, half_to_float)
    _contiguous(self)
    return result


@kernel("_softmax_backward_data")
def softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """The product of gradient and output lives until the end."""
    result: torch.Tensor = plain(aten._softmax_backward_data.default)(grad_output, output, dim, input_dtype)
    product = grad_output * output
    _hold(product, output)
    return result


@kernel("_softmax_backward_data.out")
def softmax_backward_out(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype, *, grad_input: torch.Tensor
) -> torch.Tensor:
    """The same into a given tensor."""
    result: torch.Tensor = plain(aten._softmax_backward_data.out)(
        grad_output, output, dim, input_dtype, grad_input=grad_input
    )
    product = grad_output * output
    _hold(product, output)
    return result


@kernel("_log_softmax_backward_data")
def log_softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """Needs both contiguous."""
    result: torch.Tensor = plain(aten._log_softmax_backward_data.default)(grad_output, output, dim, input_dtype)
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
    """One kernel where rows are short and the mask is contiguous; a masked copy and a softmax otherwise."""
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

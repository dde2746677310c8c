"""Softmax, layer, RMS and group norm: copies of non-contiguous inputs, products, and partial sums of weights' gradients.

Batch normalization is in `batchnorm`.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.registry import accumulator_dtype, after_outputs, contiguous, free_reversed, kernel
from tonnage.virtual.session import active

Tensors = tuple[Any, ...]

LONGEST_FUSED, MOST_BYTES_FUSED = 1024, 4096
_MANY_ROWS = 64 * 1024
_GRID = 64 * 1024 // 2


@after_outputs("_softmax", "_log_softmax")
def softmax(result: Any, self: Any, *_: Any) -> list[Any]:
    return [contiguous(self)]


@after_outputs("_softmax_backward_data", "_softmax_backward_data.out")
def softmax_backward(result: Any, grad_output: Any, output: Any, *_: Any, **out: Any) -> list[Any]:
    """Hold the product of gradient and output until the end."""
    product = grad_output * output
    return [product, contiguous(product), contiguous(output)]


@after_outputs("_log_softmax_backward_data")
def log_softmax_backward(result: Any, grad_output: Any, output: Any, *_: Any) -> list[Any]:
    return [contiguous(grad_output), contiguous(output)]


@kernel("_masked_softmax")
def masked_softmax(self: Any, mask: Any, dim: int | None = None, mask_type: int | None = None) -> Any:
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


@kernel("native_layer_norm")
def native_layer_norm(input: Any, normalized_shape: list[int], weight: Any, bias: Any, eps: float) -> Tensors:
    rows = input.contiguous()
    shape = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return output, *(torch.empty(shape, dtype=accumulator_dtype(rows.dtype), device=rows.device) for _ in range(2))


@kernel("_fused_rms_norm")
def fused_rms_norm(input: Any, normalized_shape: list[int], weight: Any, eps: float | None) -> Tensors:
    rows = input.contiguous()
    kept = rows.shape[: rows.dim() - len(normalized_shape)]
    return torch.empty_like(rows), _accumulator(rows, *kept, *(1 for _ in normalized_shape))


def unfused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replace `torch.rms_norm` for torch before 2.9: separate operators, each differentiated by autograd."""
    wide = input.to(accumulator_dtype(input.dtype))
    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    scale = wide.pow(2).mean(dims, keepdim=True).add_(torch.finfo(wide.dtype).eps if eps is None else eps).rsqrt()
    result = wide.mul(scale).type_as(input)
    return result if weight is None else result.mul(weight)


@kernel("native_layer_norm_backward")
def native_layer_norm_backward(
    grad_out: Any, input: Any, normalized_shape: list[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: list[bool],
) -> Tensors:  # fmt: skip
    return _backward(grad_out, input, normalized_shape, (weight, weight if bias is None else bias), output_mask)


@kernel("_fused_rms_norm_backward")
def fused_rms_norm_backward(
    grad_out: Any, input: Any, normalized_shape: list[int], rstd: Any, weight: Any, output_mask: list[bool]
) -> Tensors:
    return _backward(grad_out, input, normalized_shape, (weight,), output_mask)


def _backward(grad: Any, input: Any, normalized_shape: list[int], affine: Tensors, mask: list[bool]) -> Tensors:
    """Allocate gradients of the input and the affine parameters, then make the incoming gradient contiguous."""
    rows = input.contiguous()
    outputs: list[Any] = [torch.empty_like(rows) if mask[0] else None]
    outputs += [torch.empty_like(each) if wanted else None for each, wanted in zip(affine, mask[1:], strict=True)]
    dense = grad.contiguous()
    # If the sum over rows is split, the weights' gradients are sums over their parts.
    width = prod(normalized_shape)
    parts = gradient_parts(rows.numel() // width, width, active().device.gpu.sm_count) if width else 1
    wanted = [index for index in range(1, len(outputs)) if outputs[index] is not None and parts > 1]
    partial = [outputs[index].new_empty(parts, width) for index in wanted]
    for place, index in enumerate(wanted):
        outputs[index] = partial[place].sum(0)
    free_reversed(partial)
    del dense, rows
    return tuple(outputs)


def gradient_parts(rows: int, width: int, sm_count: int) -> int:
    """Return the number of parts of the sum over rows: 1 unless there are many rows and few columns."""
    if rows <= _MANY_ROWS or width // 32 >= sm_count // 2:
        return 1
    return min(_GRID // -(-width // 32), -(-rows // 32))


@after_outputs("native_group_norm")
def native_group_norm(result: Any, input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, *_: Any) -> list[Any]:
    is_affine = N and HxW != 1 and (weight is not None or bias is not None)
    return [_accumulator(input, N, C) for _ in range(2 if is_affine else 0)]


@after_outputs("native_group_norm_backward")
def native_group_norm_backward(
    result: Any, grad_out: Any, input: Any, mean: Any, rstd: Any, weight: Any, N: int, C: int, HxW: int, group: int,
    output_mask: list[bool],
) -> list[Any]:  # fmt: skip
    sums = [_accumulator(input, N, C) for _ in range(2 if N and HxW != 1 else 0)]
    if N and output_mask[0]:
        second, third = _accumulator(input, N, group), _accumulator(input, N, group)
        first = _accumulator(input, N, C) if weight is not None and HxW != 1 else None
        del third, second, first
    return sums


def _accumulator(like: Tensor, *shape: int) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.empty(shape, dtype=dtype, device=like.device)

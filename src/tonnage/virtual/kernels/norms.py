"""Layer, RMS and group norm: copies of non-contiguous inputs, and partial sums of the weights' gradients.

Batch normalization is in `batchnorm`.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain
from tonnage.virtual.session import active

Tensors = tuple[Any, ...]


_MANY_ROWS = 64 * 1024
_GRID = 64 * 1024 // 2


@kernel("native_layer_norm")
def native_layer_norm(input: Any, normalized_shape: list[int], weight: Any, bias: Any, eps: float) -> Tensors:
    rows = input.contiguous()
    shape = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    statistics = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return output, *(torch.empty(shape, dtype=statistics, device=rows.device) for _ in range(2))


@kernel("_fused_rms_norm")
def fused_rms_norm(input: Any, normalized_shape: list[int], weight: Any, eps: float | None) -> Tensors:
    rows = input.contiguous()
    kept = rows.shape[: rows.dim() - len(normalized_shape)]
    return torch.empty_like(rows), _accumulator(rows, *kept, *(1 for _ in normalized_shape))


def unfused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Replace `torch.rms_norm` for torch before 2.9: separate operators, each differentiated by autograd."""
    wide = input.to(torch.float32) if input.dtype in (torch.float16, torch.bfloat16) else input
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
    outputs = [torch.empty_like(rows) if mask[0] else None]
    outputs += [torch.empty_like(each) if wanted else None for each, wanted in zip(affine, mask[1:], strict=True)]
    dense = grad.contiguous()
    _sum_in_parts(rows, normalized_shape, outputs)
    del dense, rows
    return tuple(outputs)


def gradient_parts(rows: int, width: int, sm_count: int) -> int:
    """Return the number of parts of the sum over rows: 1 unless there are many rows and few columns."""
    if rows <= _MANY_ROWS or width // 32 >= sm_count // 2:
        return 1
    return min(_GRID // -(-width // 32), -(-rows // 32))


def _sum_in_parts(input: torch.Tensor, normalized_shape: list[int], outputs: list[Any]) -> None:
    """If the sum is split, replace the weights' gradients by sums over their parts."""
    width = prod(normalized_shape)
    rows = input.numel() // width if width else 0
    if rows <= _MANY_ROWS:
        return

    parts = gradient_parts(rows, width, active().device.gpu.sm_count)
    wanted = [index for index in range(1, len(outputs)) if outputs[index] is not None and parts > 1]
    partial = [outputs[index].new_empty(parts, width) for index in wanted]
    for place, index in enumerate(wanted):
        outputs[index] = partial[place].sum(0)
    while partial:
        partial.pop()


@kernel("native_group_norm")
def native_group_norm(input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Tensors:
    outputs = plain("native_group_norm")(input, weight, bias, N, C, HxW, group, eps)
    if N and HxW != 1 and (weight is not None or bias is not None):
        scale, shift = _accumulator(input, N, C), _accumulator(input, N, C)
        del shift, scale
    return tuple(outputs)


@kernel("native_group_norm_backward")
def native_group_norm_backward(
    grad_out: Any, input: Any, mean: Any, rstd: Any, weight: Any, N: int, C: int, HxW: int, group: int,
    output_mask: list[bool],
) -> Tensors:  # fmt: skip
    outputs = plain("native_group_norm_backward")(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)
    if not N:
        return tuple(outputs)
    sums = [_accumulator(input, N, C), _accumulator(input, N, C)] if HxW != 1 else []
    if output_mask[0]:
        second, third = _accumulator(input, N, group), _accumulator(input, N, group)
        first = _accumulator(input, N, C) if weight is not None and HxW != 1 else None
        del third, second, first
    while sums:
        sums.pop()
    return tuple(outputs)


def _accumulator(like: torch.Tensor, *shape: int) -> torch.Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.empty(shape, dtype=dtype, device=like.device)

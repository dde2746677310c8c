"""Softmax, layer, RMS and group norm: copies of non-contiguous inputs, products, and partial sums of weights' gradients.

Batch normalization is cuDNN's or PyTorch's own, between which PyTorch's own code chooses. cuDNN's workspace for channels
last was measured on an H200 (cuDNN 9.19) and follows a formula for 64 channels and more; with fewer it is within a few
hundred bytes. Contiguous inputs need none.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tonnage.virtual.kernels.convolution import suggested_format
from tonnage.virtual.kernels.library_sizes import batch_norm_bytes
from tonnage.virtual.kernels.reductions import last_power
from tonnage.virtual.kernels.registry import (
    accumulator_dtype,
    after_outputs,
    contiguous,
    free_reversed,
    kernel,
    scratch,
)
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
    is_short = length <= LONGEST_FUSED and length * self.element_size() <= MOST_BYTES_FUSED
    if is_short and mask.is_contiguous() and place == self.dim() - 1:
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
    return [_accumulator(input, N, C) for _ in range(2)] if is_affine else []


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
    return torch.empty(shape, dtype=accumulator_dtype(like.dtype), device=like.device)


# Batch normalization
Maybe: TypeAlias = "Tensor | None"

MAX_BLOCK, TILE_WIDTH, ELEMENTS_PER_THREAD = 512, 32, 16
MAX_ROWS_OF_BLOCKS, LEAST_ROWS_WORTH_A_GRID = 128, 8
INDEX_LIMIT = 2**31


def _is_fast_last(x: Tensor) -> bool:
    """Whether PyTorch's channels-last kernels apply; they also do for a matrix, whose channels are its last dimension."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    last = layout is not None and x.is_contiguous(memory_format=layout)
    return last or (x.is_contiguous() and x.stride(1) == 1)


def _way(x: Tensor) -> str:
    if x.numel() >= INDEX_LIMIT:
        return "general"
    if x.is_contiguous():
        return "channels_last" if x.stride(1) == 1 else "contiguous"
    return "channels_last" if x.dim() == 4 and _is_fast_last(x) else "general"


def reduction_grid(length: int, channels: int) -> tuple[int, int]:
    """Return the columns and rows of blocks of a reduction over all but the channels; in one row no block waits."""
    block_x = min(last_power(channels), TILE_WIDTH)
    block_y = min(last_power(-(-length // ELEMENTS_PER_THREAD)), MAX_BLOCK // block_x)
    if block_x * block_y != MAX_BLOCK:
        block_x = min(last_power(channels), MAX_BLOCK // block_y)
    rows = min(-(-length // (block_y * ELEMENTS_PER_THREAD)), MAX_ROWS_OF_BLOCKS)
    return -(-channels // block_x), 1 if rows < LEAST_ROWS_WORTH_A_GRID else rows


def _between_blocks(x: Tensor, values: int) -> None:
    """Allocate what blocks exchange: partial results, and a counter for each column of blocks."""
    channels = x.shape[1]
    columns, rows = reduction_grid(x.numel() // channels, channels)
    if rows > 1:
        staging = _accumulator(x, values * channels * rows)
        counters = torch.empty(columns, dtype=torch.int32, device=x.device)
        del counters, staging


def _per_channel(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape[1], dtype=dtype or accumulator_dtype(x.dtype), device=x.device)


@kernel("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
    input: Tensor, weight: Maybe, bias: Maybe, running_mean: Maybe, running_var: Maybe, training: bool, *_: float
) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(input)
    mean, deviation = _per_channel(input), _per_channel(input)
    if training and _way(input) == "channels_last":
        _between_blocks(input, 4)
    elif training and _way(input) == "general" and input.dtype == torch.bfloat16:
        torch.empty(input.shape, dtype=torch.float32, device=input.device)
    return output, mean, deviation


@kernel("batch_norm_stats")
def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Allocate for the first half of a synchronized batch norm."""
    mean, deviation = _per_channel(input), _per_channel(input)
    if _is_fast_last(input):
        _between_blocks(input, 4)
    return mean, deviation


@kernel("batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Maybe, input_g: bool, weight_g: bool, bias_g:
    bool,
) -> tuple[Maybe, Maybe, Maybe, Maybe]:  # fmt: skip
    """Allocate two sums for the input's gradient, and the gradients of weight and bias."""
    last = _is_fast_last(grad_out) and _is_fast_last(input) and grad_out.numel() < INDEX_LIMIT
    dtype = weight.dtype if weight is not None else mean.dtype
    sums = (torch.empty_like(mean), torch.empty_like(mean)) if input_g or last else (None, None)
    if last and weight is None:
        gradients: tuple[Maybe, Maybe] = (mean.new_empty(0), mean.new_empty(0))
    else:
        gradients = tuple(_per_channel(input, dtype) if wanted or last else None for wanted in (weight_g, bias_g))  # type: ignore[assignment]
    if last:
        _between_blocks(input, 2)
    return *sums, *gradients


@kernel("batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats_with_counts(input: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Merge the statistics of all ranks, for SyncBatchNorm: two values per channel, in float32 for half precision."""
    dtype = accumulator_dtype(mean.dtype)
    return mean.new_empty(mean.shape[1], dtype=dtype), mean.new_empty(mean.shape[1], dtype=dtype)


@kernel("batch_norm_elemt")
def batch_norm_elemt(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


@kernel("batch_norm_backward_elemt")
def batch_norm_backward_elemt(grad_out: Tensor, input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input, memory_format=suggested_format(input))


@kernel("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out: Tensor, input: Tensor, weight: Maybe, running_mean: Maybe, running_var: Maybe, save_mean: Maybe,
    save_invstd: Maybe, train: bool, eps: float, output_mask: list[bool],
) -> tuple[Maybe, Maybe, Maybe]:  # fmt: skip
    """Allocate gradients: fused unless channels are last, else in two steps."""
    reduces = train or output_mask[1] or output_mask[2]
    small = max(input.numel(), grad_out.numel()) < INDEX_LIMIT
    if reduces and output_mask[0] and not _is_fast_last(input) and small:
        to_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        dtype = weight.dtype if weight is not None else None
        scale, shift = (_per_channel(input, dtype) if wanted else None for wanted in output_mask[1:])
        return to_input, scale, shift
    mean = save_mean if save_mean is not None and save_mean.numel() else running_mean
    deviation = save_invstd if save_invstd is not None and save_invstd.numel() else _per_channel(input)
    sum_dy = sum_dy_xmu = to_weight = to_bias = None
    if reduces:
        known = mean if mean is not None and mean.dtype == accumulator_dtype(input.dtype) else _per_channel(input)
        sum_dy, sum_dy_xmu, to_weight, to_bias = batch_norm_backward_reduce(
            grad_out, input, known, deviation, weight, *output_mask
        )  # fmt: skip
    gradient = None
    if output_mask[0]:
        is_last = train and _way(input) == _way(grad_out) == "channels_last"
        layout = suggested_format(input) if is_last else torch.contiguous_format
        gradient = torch.empty_like(input, memory_format=layout)
    del sum_dy_xmu, sum_dy, deviation
    return gradient, to_weight if output_mask[1] else None, to_bias if output_mask[2] else None


def _take_workspace(x: Tensor, backward: bool) -> None:
    if suggested_format(x) != torch.contiguous_format:
        scratch(batch_norm_bytes(x.numel(), x.shape[1], x.element_size(), backward), x)


@kernel("cudnn_batch_norm")
def cudnn_batch_norm(
    input: Tensor, weight: Tensor, bias: Maybe, running_mean: Maybe, running_var: Maybe, training: bool, *_: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate statistics and workspace in training only; the reserve space is empty without a fused activation."""
    active().device.use("cudnn")
    output = torch.empty_like(input, memory_format=suggested_format(input))
    reserve = torch.empty(0, dtype=torch.uint8, device=input.device)
    if not training:
        return output, weight.new_empty(0), weight.new_empty(0), reserve
    mean, deviation = torch.empty_like(weight), torch.empty_like(weight)
    _take_workspace(input, False)
    return output, mean, deviation, reserve


@kernel("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(
    input: Tensor, grad_output: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    layout = suggested_format(input)
    laid_grad = grad_output.contiguous(memory_format=layout)
    to_input = torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=layout)
    to_weight, to_bias = torch.empty_like(weight), torch.empty_like(weight)
    _take_workspace(input, True)
    del laid_grad
    return to_input, to_weight, to_bias

"""The backward pass of embeddings.

Few indices are added in one kernel; many are sorted, and the rows of equal index summed in parts.
"""

from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.cub import scan_by_key_bytes, scan_bytes, select_unique_bytes, unique_by_key_bytes
from tonnage.virtual.kernels.registry import accumulator_dtype, kernel, scratch
from tonnage.virtual.kernels.sorting import radix_sort
from tonnage.virtual.session import active

FEW_INDICES = 3072
ROWS_PER_THREAD = 10
MAX_BLOCK, WARP = 1024, 32
BLOCKS_PER_MULTIPROCESSOR = 4
SUM, MEAN, MAX = 0, 1, 2


@kernel("embedding_dense_backward")
def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    indices, grad = indices.contiguous(), grad_output.contiguous()
    if indices.numel() <= FEW_INDICES and not scale_grad_by_freq:
        return grad.new_zeros((num_weights, grad.shape[-1]))
    return _sorted_backward(grad, indices, num_weights, scale_grad_by_freq, bags=False)


@kernel("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor,
    maximum_indices: Tensor, num_weights: int, scale_grad_by_freq: bool, mode: int, *_: Any,
) -> Tensor:  # fmt: skip
    grad = grad.contiguous()
    if mode == MAX or not indices.numel():
        return grad.new_zeros((num_weights, grad.shape[1]))
    return _sorted_backward(grad, indices.contiguous(), num_weights, scale_grad_by_freq, bags=True)


@kernel("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocate the bags, and what their backward pass needs."""
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    indices, offsets = indices.to(dtype), offsets.to(dtype)
    bags = offsets.shape[0] - include_last_offset
    bag_size = indices.new_empty(offsets.shape)
    offset2bag = indices.new_empty((indices.shape[0],))
    output = weight.new_empty((bags, weight.shape[1]))
    maximum = indices.new_empty((bags, weight.shape[1]) if mode == MAX else (0,))
    return output, offset2bag, bag_size, maximum


@kernel("embedding_renorm_")
def embedding_renorm(self: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Sort the indices to find the rows in use."""
    ordered = indices.contiguous().sort()[0].contiguous()
    unique, count = torch.empty_like(ordered), torch.empty((), dtype=torch.int64, device=self.device)
    scratch(select_unique_bytes(ordered.numel(), ordered.element_size()), self)
    del count, unique, ordered
    return self


def _sorted_backward(grad: Tensor, indices: Tensor, num_weights: int, by_frequency: bool, *, bags: bool) -> Tensor:
    count, item_bytes = indices.numel(), indices.element_size()
    ordered, order = torch.empty_like(indices), torch.empty_like(indices)
    positions = indices.new_empty(count)
    # Since 2.13 only the bits needed for a row's number are sorted.
    bits = max(1, num_weights.bit_length()) if active().device.torch_version >= (2, 13) else None
    radix_sort(count, item_bytes, item_bytes, indices, bits)
    del positions
    frequency = None
    if by_frequency:
        frequency = torch.empty_like(indices)
        for _ in range(2):
            scratch(scan_by_key_bytes(count, item_bytes), grad)
    result = _summed_rows(grad, indices, num_weights, bags)
    del frequency, order, ordered
    return result


def _summed_rows(grad: Tensor, indices: Tensor, num_weights: int, bags: bool) -> Tensor:
    count, item_bytes, width = indices.numel(), indices.element_size(), grad.shape[-1]
    result = grad.new_zeros((num_weights, width))
    offsets = indices.new_empty(count)
    segments_found = torch.empty((), dtype=torch.int64, device=grad.device)
    keys = scratch(count * item_bytes, grad)
    scratch(unique_by_key_bytes(count, item_bytes), grad)
    del keys
    segments = min(count, num_weights)
    parts_per_segment, part_starts = indices.new_empty(segments), indices.new_empty(segments)
    scratch(scan_bytes(segments, item_bytes), grad)
    parts_found = torch.empty((), dtype=torch.int64, device=grad.device)
    parts = count // ROWS_PER_THREAD + segments
    part_offsets = indices.new_empty(parts)
    accumulate = accumulator_dtype(grad.dtype)
    # Since 2.11 parts are added atomically for few long segments, which would leave most of the card idle.
    padded, device = -(-width // WARP) * WARP, active().device
    blocks = -(-segments * padded // min(padded, MAX_BLOCK)) if padded else 0
    is_idle = blocks < device.gpu.sm_count * BLOCKS_PER_MULTIPROCESSOR and parts > blocks * 4
    in_place = is_idle and device.torch_version >= (2, 11) and not torch.are_deterministic_algorithms_enabled()
    if not bags and in_place:
        of_segment = indices.new_empty(parts)
        sums = grad.new_zeros((num_weights, width), dtype=accumulate) if accumulate != grad.dtype else None
    else:
        of_segment, sums = None, grad.new_empty((parts, width), dtype=accumulate)
    del sums, of_segment, part_offsets, parts_found, part_starts, parts_per_segment, segments_found, offsets
    return result


@kernel("_embedding_bag_backward")
def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor,
    maximum_indices: Tensor, num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, *rest: Any,
) -> Tensor:  # fmt: skip
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    indices, offsets = indices.to(dtype), offsets.to(dtype)
    aten, options = torch.ops.aten, (num_weights, scale_grad_by_freq, mode, *rest)
    result: Tensor
    if sparse:
        result = aten._embedding_bag_sparse_backward(grad, indices, offsets, offset2bag, bag_size, *options)
    else:
        result = aten._embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, *options)
    return result

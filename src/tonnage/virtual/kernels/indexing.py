"""Indexing by tensors, masks and lists, embeddings, counting and repeating.

A mask becomes the coordinates of its true elements; for an unknown mask, as many as `values` assumes. Accumulating at
repeated positions (`index_put_` with `accumulate`, the backward of indexing) sorts the positions first.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tonnage.virtual.kernels import cub
from tonnage.virtual.kernels.reductions import scan
from tonnage.virtual.kernels.registry import accumulator_dtype, after_outputs, free_reversed, kernel, plain, scratch
from tonnage.virtual.kernels.sorting import radix_sort
from tonnage.virtual.kernels.values import forget, is_known, put, true_elements
from tonnage.virtual.session import active

aten = torch.ops.aten
Index: TypeAlias = Tensor | None
MASKS = (torch.bool, torch.uint8)
INT_MAX = 2**31 - 1
CHUNK = 1 << 30


@kernel("nonzero")
def nonzero(self: Tensor) -> Tensor:
    source = self.contiguous()
    found = source.cpu().nonzero() if is_known(source) else None
    rows = true_elements(source) if found is None else found.shape[0]
    chunk = self.numel() if self.numel() < INT_MAX else CHUNK
    chunks = [min(chunk, self.numel() - start) for start in range(0, self.numel(), chunk)] if chunk else [0]
    counts = scratch(4 * len(chunks), self)
    for count in chunks:
        scratch(cub.reduce_bytes(count, 4), self)
    result = torch.empty((self.dim(), rows), dtype=torch.int64, device=self.device)
    for count in chunks if self.dim() else ():
        scratch(cub.select_flagged_bytes(count, 8), self)
    del counts, source
    if found is None and result.numel() <= CHUNK >> 10:
        # That many elements, spread evenly over the tensor.
        places = torch.arange(rows, device="cpu") * math.prod(self.shape) // max(rows, 1)
        columns = torch.unravel_index(places, tuple(self.shape)) if self.dim() else ()
        found = torch.stack(columns, 1) if columns else torch.empty(rows, 0, dtype=torch.int64, device="cpu")
    return result.t() if found is None else put(result, found.t().contiguous()).t()


@kernel("nonzero.out")
def nonzero_out(self: Tensor, *, out: Tensor) -> Tensor:
    out.set_(nonzero(self))  # type: ignore[call-overload]
    return out


def _is_simple(indices: Sequence[Index]) -> bool:
    given = [i for i in indices if i is not None]
    plain_ones = all(i.is_cuda and i.dtype == torch.int64 for i in given)
    return plain_ones and (len(given) < 2 or len({(i.shape, i.stride()) for i in given}) == 1)


def _expanded(self: Tensor, indices: Sequence[Index], *, same_device: bool) -> list[Index]:
    """Convert masks to coordinates, and broadcast all indices."""
    result: list[Index] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:
            columns = index.nonzero()
            columns = columns.to(self.device, non_blocking=True) if same_device else columns
            result += [columns.select(1, j) for j in range(index.dim())]
        else:
            result.append(index.to(self.device) if index is not None and same_device else index)
    given = iter(torch.broadcast_tensors(*[i for i in result if i is not None]))
    return [None if i is None else next(given) for i in result]


def prepared(self: Tensor, indices: Sequence[Index]) -> list[Index]:
    """Return indices as the kernel reads them: on the device, int64, of one shape and one stride."""
    result = [None if i is None else i.to(torch.int64) for i in _expanded(self, indices, same_device=True)]
    given = [i for i in result if i is not None]
    if len({i.stride() for i in given}) > 1:
        result = [None if i is None else i.contiguous() for i in result]
    return result


@kernel("index.Tensor")
def index(self: Tensor, indices: list[Index]) -> Tensor:
    if not _is_simple(indices):
        indices = prepared(self, indices)
    result: Tensor = plain("index.Tensor")(self, indices)
    return result


@kernel("index.Tensor_out")
def index_out(self: Tensor, indices: list[Index], *, out: Tensor) -> Tensor:
    plain("index.Tensor_out")(self, prepared(self, indices), out=out)
    return out


@kernel("masked_select")
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    mask, self = torch.broadcast_tensors(*(each if each.dim() else each.unsqueeze(0) for each in (mask, self)))
    result: Tensor = aten.index.Tensor(self, [mask])
    return result


@kernel("_index_put_impl_")
def index_put(
    self: Tensor, indices: list[Index], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    given = [d for d, i in enumerate(indices) if i is not None]
    if not accumulate and values.numel() == 1 and values.is_cpu and len(given) == 1:
        # A single value from the host is written under one mask.
        mask = indices[given[0]]
        if mask is not None and mask.dtype in MASKS and mask.is_cuda:
            for _ in range(self.dim() - given[0] - mask.dim()):
                mask = mask.unsqueeze(-1)
            return self.masked_fill_(mask, values.item())
    if values.device != self.device and values.dim() == 0:
        values = values.to(self.device)
    sorts = accumulate or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1)
    if sorts:
        _put_sorted(self, indices, values, unsafe)
    elif not _is_simple(indices):
        indices = prepared(self, indices)
    if sorts and not _is_simple(indices):
        return forget(self)
    plain("_index_put_impl_")(self, indices, values, accumulate, unsafe)
    return self


def _put_sorted(self: Tensor, indices: list[Index], values: Tensor, unsafe: bool) -> None:
    source = self.contiguous()
    at = [None if i is None else i.to(torch.int64) for i in _expanded(source, indices, same_device=False)]
    at += [None] * (self.dim() - len(at))
    front, given = source, [d for d, i in enumerate(at) if i is not None]
    if given != list(range(given[0], given[-1] + 1)):  # indexed dimensions that are not adjacent move to the front
        order = given + [d for d, i in enumerate(at) if i is None]
        front, at, given = source.permute(order), [at[d] for d in order], list(range(len(given)))
    places = _linear_places(front, at, check_range=not unsafe)
    width = math.prod(front.shape[given[-1] + 1 :])
    shape = [*front.shape[: given[0]], *places.shape, *front.shape[given[0] + len(given) :]]
    del at
    expanded = values.expand(shape).contiguous()
    if places.numel() and width:
        target = front.contiguous()
        flat = places.reshape(-1)
        held = [torch.empty_like(flat, memory_format=torch.contiguous_format) for _ in range(3)]
        largest = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        radix_sort(flat.numel(), 8, 8, flat, bits=max(1, (largest // width).bit_length()))
        free_reversed(held)
        del flat, target
    del expanded, places, front, source


def _linear_places(self: Tensor, at: list[Index], *, check_range: bool) -> Tensor:
    places: Tensor | None = None
    for i in at:
        if i is None:
            continue
        if check_range and i.numel():
            for find in (torch.max, torch.min):
                extreme = find(i)
                flag = extreme < 0
                del flag, extreme
        wrapped = torch.empty_like(i)
        scaled = torch.empty_like(wrapped)
        del wrapped
        scaled = scaled if scaled.is_cuda else scaled.to(self.device)
        places = scaled if places is None else places
        del scaled
    assert places is not None
    return places


@kernel("masked_scatter_")
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    if not self.numel():
        return self
    places = torch.empty(self.shape, dtype=torch.int64, device=self.device)
    flags = mask.expand(self.shape).contiguous()
    scan(self.numel(), torch.int64, self)
    values = source.contiguous()
    del values, flags, places
    return forget(self)


@after_outputs("scatter_reduce.two", "scatter_reduce_.two")
def scatter_reduce(
    result: Tensor, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **_: bool
) -> list[Tensor]:
    """Allocate the counts that a mean needs."""
    if reduce != "mean":
        return []
    ones, counts = torch.empty_like(src), torch.empty_like(result)
    return [ones, counts, torch.empty_like(counts, dtype=torch.bool)]


@kernel("repeat_interleave.Tensor")
def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Return each position as often as it is repeated."""
    if not repeats.shape[0]:
        return torch.empty_like(repeats)
    known = is_known(repeats)
    sums = repeats.contiguous().cumsum(0)
    if output_size is None:
        (repeats >= 0).all()
        output_size = int(repeats.cpu().sum()) if known else repeats.shape[0]
    if not known:
        words = "Unknown repeats count as one each, unless output_size says otherwise."
        active().stand_ins.assume("repeat_interleave", words)
    result = repeats.new_empty(output_size)
    del sums
    return put(result, torch.repeat_interleave(repeats.cpu())) if known else result


@kernel("bincount")
def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    if not self.numel():
        return torch.zeros(minlength, dtype=torch.int64, device=self.device)
    torch.min(self)
    torch.max(self)
    known = is_known(self)
    if not known:
        active().stand_ins.assume("bincount", "Unknown numbers are below minlength.")
    bins = max(int(self.cpu().max()) + 1, minlength) if known else max(minlength, 1)
    result = torch.zeros(bins, dtype=dtype, device=self.device)
    if known and (weights is None or is_known(weights)):
        put(result, torch.bincount(self.cpu(), None if weights is None else weights.cpu(), minlength))
    return result


@kernel("histc")
def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count elements in bins; without a given range, that of the values is used."""
    result = self.new_zeros(bins)
    if min == max and self.numel():
        torch.min(self)
        torch.max(self)
    return result


@after_outputs("isin.Tensor_Tensor")
def isin(
    result: Tensor, elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> list[Tensor | None] | None:
    """Compare all pairs if there are few, else sort both."""
    if not elements.numel():
        return None
    if not test_elements.numel():
        put(result, torch.full(result.shape, invert, device="cpu"))
    if test_elements.numel() < int(10.0 * elements.numel() ** 0.145):
        pairs = torch.empty((*elements.shape, test_elements.numel()), dtype=torch.bool, device=elements.device)
        return [pairs, pairs.any(-1)]
    order = None
    if assume_unique:
        flat, tests = elements.ravel(), test_elements.ravel()
    else:
        flat, order = aten._unique(elements, False, True)
        tests, _ = aten._unique(test_elements, False)
    everything = torch.cat([flat, tests])
    del tests, flat
    values, places = everything.sort(stable=True, dim=0)
    duplicates = torch.empty_like(values, dtype=torch.bool)
    torch.empty(values.numel() - 1, dtype=torch.bool, device=elements.device)  # equal neighbours
    mask = torch.empty_like(duplicates)
    found = None if order is None else torch.empty(order.shape, dtype=torch.bool, device=elements.device)
    return [order, everything, places, values, duplicates, mask, found]


# The backward pass of embeddings: few indices are added in one kernel; many are sorted, and the rows of equal index
# summed in parts.
FEW_INDICES = 3072
ROWS_PER_THREAD = 10
MAX_BLOCK, WARP = 1024, 32
BLOCKS_PER_MULTIPROCESSOR = 4
MAX = 2  # of the modes SUM, MEAN, MAX


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
    scratch(cub.select_unique_bytes(ordered.numel(), ordered.element_size()), self)
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
            scratch(cub.scan_by_key_bytes(count, item_bytes), grad)
    result = _summed_rows(grad, indices, num_weights, bags)
    del frequency, order, ordered
    return result


def _summed_rows(grad: Tensor, indices: Tensor, num_weights: int, bags: bool) -> Tensor:
    count, item_bytes, width = indices.numel(), indices.element_size(), grad.shape[-1]
    result = grad.new_zeros((num_weights, width))
    offsets = indices.new_empty(count)
    segments_found = torch.empty((), dtype=torch.int64, device=grad.device)
    keys = scratch(count * item_bytes, grad)
    scratch(cub.unique_by_key_bytes(count, item_bytes), grad)
    del keys
    segments = min(count, num_weights)
    parts_per_segment, part_starts = indices.new_empty(segments), indices.new_empty(segments)
    scratch(cub.scan_bytes(segments, item_bytes), grad)
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
    options = (num_weights, scale_grad_by_freq, mode, *rest)
    result: Tensor
    if sparse:
        result = aten._embedding_bag_sparse_backward(grad, indices, offsets, offset2bag, bag_size, *options)
    else:
        result = aten._embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, *options)
    return result

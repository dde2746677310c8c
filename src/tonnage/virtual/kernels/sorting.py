"""Sorting and selection: rows of up to 4,096 sort in place, longer ones through CUB with buffers for keys and
indices.

Unknown indices are sampled uniformly (`values`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tonnage.virtual.assumptions import distinct_values
from tonnage.virtual.kernels import cub
from tonnage.virtual.kernels.registry import free_reversed, is_dense, kernel, plain, scratch, strides_of
from tonnage.virtual.kernels.values import choose, choose_distinct, is_known, law_of, put
from tonnage.virtual.session import active

aten = torch.ops.aten
LONGEST_IN_PLACE = 4096
LONGEST_SEGMENT = 1_000_000
FEWEST_SEGMENTS = 128
INT_MAX = 2**31 - 1
Results = tuple[Tensor, Tensor, Tensor]


def _empty(count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(count, dtype=dtype, device=like.device)


@kernel("sort.stable", "sort.values_stable")
def sort(
    self: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False, **out: Tensor
) -> tuple[Tensor, Tensor]:
    by_shape = plain("sort.values_stable" if out else "sort.stable")
    values, indices = by_shape(self, stable=stable, dim=dim, descending=descending, **out)
    if not self.numel() or not self.dim():
        return values, indices
    dim %= self.dim()
    length = self.shape[dim]
    if length <= LONGEST_IN_PLACE:
        _empty(length, torch.int64, self)  # positions
    else:
        _sort_long(self, dim, values, indices)
    choose_distinct(indices, length, dim, "sort")
    return values, indices


def _sort_long(self: Tensor, dim: int, values: Tensor, indices: Tensor) -> None:
    source = self
    if not (self.stride(dim) == 1 and is_dense(self)):
        # A dense copy in the order of the tensor's own strides, with `dim` fastest.
        order = sorted(range(self.dim()), key=lambda d: -1 if d == dim else self.stride(d))
        strides = strides_of(self.shape, order)
        source = torch.empty_strided(self.shape, strides, dtype=self.dtype, device=self.device)
    held = [source]
    for result in (values, indices):
        if result.stride() != source.stride():
            held.append(torch.empty_strided(source.shape, source.stride(), dtype=result.dtype, device=self.device))
    del source
    length, key_bytes = self.shape[dim], self.element_size()
    batch = min(self.numel(), INT_MAX) // length * length
    for start in range(0, self.numel(), batch):
        count = min(batch, self.numel() - start)
        segments = count // length
        if segments == 1 or length >= LONGEST_SEGMENT:
            positions = _empty(length, torch.int64, self)
            for _ in range(segments):
                radix_sort(length, key_bytes, 8, self)
            del positions
        elif segments < FEWEST_SEGMENTS:
            pairs, sorted_pairs = scratch(count * 8, self), scratch(count * 8, self)
            keys = scratch(count * key_bytes, self)
            radix_sort(count, key_bytes, 8, self)
            del keys
            radix_sort(count, 8, 0, self, bits=max(1, math.ceil(math.log2(segments))))
            del sorted_pairs, pairs
        else:
            positions = _empty(count, torch.int64, self)
            scratch(cub.segmented_sort_bytes(count, key_bytes, 8), self)
            del positions
    free_reversed(held)


def radix_sort(count: int, key_bytes: int, value_bytes: int, like: Tensor, bits: int | None = None) -> None:
    """Allocate and free CUB's storage."""
    scratch(cub.radix_sort_bytes(count, key_bytes, value_bytes, bits, floating=like.is_floating_point()), like)


@kernel("topk", "topk.values")
def topk(
    self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **out: Tensor
) -> tuple[Tensor, Tensor]:
    values, indices = plain("topk.values" if out else "topk")(self, k, dim, largest, sorted, **out)
    if not k or not self.numel():
        return values, indices
    length = self.shape[dim] if self.dim() else 1
    source = self.contiguous()
    _topk_in_blocks(self.numel() // length, length, self)
    del source
    if sorted and k > LONGEST_IN_PLACE:
        sorted_indices, sorted_values = torch.empty_like(indices), torch.empty_like(values)
        aten.sort.values_stable(
            values, stable=False, dim=dim, descending=True, values=sorted_values, indices=sorted_indices
        )
        torch.empty_like(indices)  # gathered
        del sorted_values, sorted_indices
    if self.dim():
        choose_distinct(indices, length, dim % self.dim(), "topk")
    return values, indices


def _topk_in_blocks(slices: int, length: int, self: Tensor) -> None:
    """Allocate the buffers of the multi-block kernel, which is used for long slices."""
    limits = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
    if length < next((least for most, least in limits if slices <= most), 400):
        return
    threads, registers_per_thread, digits = 256, 40, 256
    gpu = active().device.gpu
    resident = gpu.sm_count * (gpu.registers_per_sm // (registers_per_thread * threads)) * threads
    items = max(4, min(-(-slices * length // resident), 64))
    blocks = slices * -(-length // (items * threads))
    radix_bytes = max(self.element_size(), 4)
    sizes = (
        slices * self.element_size(), 2 * slices * 4, 2 * slices * radix_bytes, blocks * digits * 2, slices * digits * 4,
        blocks * 4, blocks * 4,
    )  # fmt: skip
    held = [scratch(size, self) for size in sizes]
    for _ in range(2):
        scratch(cub.scan_by_key_bytes(blocks, 4), self)
    free_reversed(held)


@kernel("median")
def median(self: Tensor) -> Tensor:
    ordered = self.flatten().sort()[0]
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(self.numel() - 1) // 2])


@kernel("nanmedian")
def nanmedian(self: Tensor) -> Tensor:
    """Sort all elements; the median's position depends on the number of NaNs."""
    ordered = self.flatten().sort()[0]
    mask = ordered.isnan()
    count = mask.sum()
    rest = torch.rsub(count, self.numel() - 1)
    half = rest / 2
    place = half.to(torch.int64)
    del half, rest, count, mask
    result: Tensor = aten.index.Tensor(ordered, [place])
    return result


@kernel("multinomial")
def multinomial(self: Tensor, num_samples: int, replacement: bool = False, *, generator: object = None) -> Tensor:
    """Sample categories uniformly, because the weights are unknown."""
    shape = (num_samples,) if self.dim() == 1 else (self.shape[0], num_samples)
    result = torch.empty(shape, dtype=torch.int64, device=self.device)
    if replacement and num_samples > 1:
        weights = self if self.dim() == 2 else self.view(1, -1)
        held = [torch.empty_like(weights, memory_format=torch.contiguous_format) for _ in range(3)]
        torch.cumsum(held[1], 1, out=held[2])
        free_reversed(held)
        return choose(result, self.shape[-1], "multinomial")
    # The flags that live during sampling: whether all weights are valid, and whether a row has none.
    largest = self.max()
    finite = largest < math.inf
    smallest = self.min()
    positive = smallest >= 0
    valid = finite & positive
    del positive, smallest, finite, largest
    total = self.sum() if self.dim() == 1 else self.sum(1)
    zero = total == 0
    any_zero = zero if self.dim() == 1 else zero.any()
    del zero, total
    nonzero = ~any_zero
    del nonzero
    keys = torch.empty_like(self)
    if num_samples == 1:
        torch.argmax(keys, -1, True, out=result)
    else:
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        torch.topk(keys, num_samples, out=(values, result))
        del values
    del keys, any_zero, valid
    return result


@kernel("_unique2")
def unique2(self: Tensor, sorted: bool = True, *returned: bool, **named: bool) -> Results:
    return _unique(self, False, *returned, **named)


@kernel("_unique")
def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    return _unique(self, False, return_inverse)[:2]


@kernel("unique_consecutive")
def unique_consecutive(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Results:
    if dim is not None:
        return _unique_dim(self, dim, True, return_inverse, return_counts)
    return _unique(self, True, return_inverse, return_counts)


@kernel("unique_dim")
def unique_dim(self: Tensor, dim: int, sorted: bool = True, *returned: bool, **named: bool) -> Results:
    return _unique_dim(self, dim, False, *returned, **named)


def _found(self: Tensor, consecutive: bool, dim: int | None = None) -> tuple[Tensor, ...] | None:
    if not is_known(self):
        return None
    find: Callable[..., tuple[Tensor, ...]] = torch.unique_consecutive if consecutive else torch.unique
    return find(self.cpu(), return_inverse=True, return_counts=True, dim=dim)


def expected_distinct(self: Tensor, consecutive: bool = False) -> int:
    """Return the expected number of distinct values in an unknown tensor."""
    law = None if consecutive else law_of(self)
    if law is None and self.dtype == torch.bool and not consecutive:
        return min(2, self.numel())
    unknown = "No value occurs twice in a tensor whose values are not known."
    expected = "Random integers have as many distinct values as can be expected."
    active().stand_ins.assume("unique", unknown if law is None else expected)
    return distinct_values(law, self.numel())


def _unique(self: Tensor, consecutive: bool, return_inverse: bool = False, return_counts: bool = False) -> Results:
    found, count, none = _found(self, consecutive), self.numel(), _empty(0, torch.int64, self)
    self = self.contiguous()
    ordered, order = self, none
    if not consecutive:
        ordered = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if return_inverse:
            positions, order = _empty(count, torch.int64, self), _empty(count, torch.int64, self)
            radix_sort(count, self.element_size(), 8, self)
            del positions
        else:
            radix_sort(count, self.element_size(), 0, self)
    inverse = none
    if return_inverse:
        inverse = torch.empty(self.shape, dtype=torch.int64, device=self.device)
        located = _empty(count, torch.int32 if consecutive else torch.int64, self)
        scratch(cub.scan_bytes(count, 4, plus=True), self)
        del located
        inverse = inverse if found is None else put(inverse, found[1])
    values = _empty(count, self.dtype, self)
    length = _empty(1, torch.int64, self)
    distinct = expected_distinct(self, consecutive) if found is None else found[0].numel()
    counts = none
    if return_counts:
        counts = _empty(count, torch.int64, self)
        if found is not None:
            put(counts, torch.nn.functional.pad(found[2], (0, count - distinct)))
        counts.resize_(distinct)
    primitive = self.dtype not in (torch.float16, torch.bfloat16)
    selected = cub.select_unique_bytes(count, self.element_size(), primitive=primitive)
    storage = scratch(cub.run_length_bytes(count) if return_counts else selected, self)
    del storage, length, order, ordered
    if found is not None:
        put(values, torch.nn.functional.pad(found[0], (0, count - distinct)))
    elif self.dtype == torch.bool and distinct == 2:
        put(values, torch.arange(count, device="cpu") > 0)
    return values.resize_(distinct), inverse, counts


def _unique_dim(
    self: Tensor, dim: int, consecutive: bool, return_inverse: bool = False, return_counts: bool = False
) -> Results:
    found = _found(self, consecutive, dim)
    count = self.shape[dim]
    distinct = count if found is None else found[0].shape[dim]
    if found is None and self.dim() <= 1:
        distinct = expected_distinct(self, consecutive)
    slices = self.moveaxis(dim, 0).contiguous()
    indices = put(_empty(count, torch.int64, self), torch.arange(count, device="cpu"))
    inverse = _empty(count if return_inverse else 0, torch.int64, self)
    counts = _empty(distinct if return_counts else 0, torch.int64, self)
    if found is not None:
        inverse = put(inverse, found[1]) if return_inverse else inverse
        counts = put(counts, found[2]) if return_counts else counts
    result = self.index_select(dim, indices[:distinct])
    del indices, slices
    return (result if found is None else put(result, found[0])), inverse, counts

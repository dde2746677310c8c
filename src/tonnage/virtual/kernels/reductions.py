"""Reductions and scans: large reductions, split over thread blocks, stage partial results; some cast their input first.

A reduction split over several thread blocks stages partial results in a buffer, with a semaphore for each output. The
launch configuration depends on sizes and strides after dimensions have been sorted and merged, on the element types,
and on the number of SMs. Over a single row, cumulative operators run on CUB and need its temporary storage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.cub import scan_bytes
from tonnage.virtual.kernels.registry import (
    after_outputs,
    contiguous,
    free_reversed,
    is_dense,
    kernel,
    operator_named,
    plain,
    scratch,
)
from tonnage.virtual.kernels.values import choose, guess, is_known
from tonnage.virtual.session import active

LOW_PRECISION = (torch.float16, torch.bfloat16)
# The bytes in which narrow types are summed.
SUMMED_BYTES = {torch.float16: 4, torch.bfloat16: 4, torch.complex32: 8}
# Elements of one CUB scan. Structs in CUB, so that value and status do not share a word.
MOST_ITEMS = 1 << 30
NOT_PRIMITIVE = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_CHUNK = 65536  # elements per block of a multi-tensor kernel

# Operators by kind of reduction; a dot separates the overload.
OPERATORS = {
    "sum": "sum.dim_IntList sum.IntList_out mean.dim mean.out",
    "nansum": "nansum nansum.out",
    "prod": "prod prod.dim_int prod.int_out",
    "norm": "linalg_vector_norm linalg_vector_norm.out "
    "norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.out norm.dtype_out",
    "moment": "std.correction std.correction_out var.correction var.correction_out "
    "var_mean.correction std_mean.correction",
    "same": "all all.dim all.dims all.out all.dims_out all.all_out any any.dim any.dims any.out any.dims_out any.all_out "
    "amax amax.out amin amin.out max max.unary_out min min.unary_out",
    "indexed": "max.dim max.dim_max min.dim min.dim_min",
    "pair": "aminmax aminmax.out",
}


INT32_MAX = 2**31 - 1
MAX_THREADS = 512
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
# Smaller reductions are never split: 128 threads (vectors of 4 outputs) of 256 values, 64 for complex doubles.
FEWEST_SPLIT = 64 * MAX_VALUES_PER_THREAD


@dataclass(frozen=True, slots=True)
class Element:
    """The element sizes of a reduction, in bytes: as read and as accumulated; and how many values a load takes."""

    scalar_bytes: int
    carried_bytes: int
    vector: int = 4
    max_threads: int = MAX_THREADS


@dataclass(frozen=True, slots=True)
class WarpLimits:
    """The properties of the card that matter."""

    multiprocessors: int
    threads_per_multiprocessor: int
    warp: int = 32


@dataclass(frozen=True, slots=True)
class Loop:
    """Sizes and byte strides, fastest dimension first; reduced dimensions have output stride 0 and come first."""

    shape: tuple[int, ...]
    output: tuple[int, ...]
    input: tuple[int, ...]
    address: int


def _types(kind: str, self: Tensor, result: Tensor) -> tuple[torch.dtype, Element, bool]:
    """Return the dtype that is read, its element sizes, and whether the result can hold partial sums."""
    dtype = self.dtype
    # Half precision is reduced to float32 directly; others are cast to the result's dtype first.
    is_direct = dtype in LOW_PRECISION and result.dtype == torch.float32
    if kind not in ("same", "indexed", "pair") and not is_direct:
        dtype = result.dtype.to_complex() if self.is_complex() and not result.is_complex() else result.dtype
    carried, vector, accumulates = dtype.itemsize, 4, kind == "same"
    match kind:
        case "sum" | "nansum" | "prod":
            carried = SUMMED_BYTES.get(dtype, carried)
            vector = 8 if kind == "sum" and dtype.itemsize == 2 else 4
            accumulates = kind == "prod" or dtype != result.dtype or dtype not in SUMMED_BYTES
        case "norm":
            carried = SUMMED_BYTES.get(dtype.to_real(), dtype.to_real().itemsize)
            accumulates = dtype not in LOW_PRECISION
        case "moment":
            carried, vector = 32 if dtype == torch.float64 else 16, 2
        case "indexed":
            carried = 16
        case "pair":
            carried *= 2
    return dtype, Element(dtype.itemsize, carried, vector, 256 if dtype == torch.complex128 else 512), accumulates


def _register(name: str, kind: str) -> None:
    word, by_shape = name.partition(".")[0], plain(name)
    places = {argument.name: place for place, argument in enumerate(operator_named(name)._schema.arguments)}
    # For unknown values, checks hold and no flag is set.
    otherwise = {"all": True, "any": False}.get(word)

    def argument(word: str, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        place = places.get(word, len(given))
        return keywords.get(word, given[place] if place < len(given) else None)

    @kernel(name)
    def reduce(*given: Any, **keywords: Any) -> Any:
        result = by_shape(*given, **keywords)
        self, first = given[0], result[0] if isinstance(result, tuple) else result
        if self.numel() >= FEWEST_SPLIT or self.dtype != first.dtype:
            dim, keepdim = argument("dim", given, keywords), argument("keepdim", given, keywords)
            _stage(self, first, dim, bool(keepdim), kind)
        if otherwise is not None and not is_known(first):
            active().stand_ins.assume(word, f"Of values that are not known, `{word}` is {otherwise}.")
            guess(first.fill_(otherwise))
        elif kind == "indexed" and self.dim():
            choose(result[1], self.shape[argument("dim", given, keywords)], word)
        return result


def _stage(self: Tensor, result: Tensor, dim: Any, keepdim: bool, kind: str) -> None:
    """Allocate what the reduction holds in addition to its result, in order."""
    dtype, element, accumulates = _types(kind, self, result)
    source = self if dtype == self.dtype else torch.empty_like(self, dtype=dtype)
    if self.numel() < FEWEST_SPLIT:
        return
    loop = loop_of(source, result, dim, keepdim)
    gpu = active().device.gpu
    card = WarpLimits(gpu.sm_count, gpu.max_threads_per_sm, gpu.warp_size)
    held = None
    if not accumulates and element.carried_bytes > result.dtype.itemsize and not fits_32_bits(loop):
        spans = (size * stride for size, stride in zip(loop.shape, loop.output, strict=True))
        held = scratch(max(result.dtype.itemsize, *spans) // result.dtype.itemsize * element.carried_bytes, self)
    for buffer_bytes, semaphore_bytes in staging_bytes(loop, element, card):
        buffer = scratch(buffer_bytes, self)
        semaphores = scratch(semaphore_bytes, self)
        del semaphores, buffer
    del held


def loop_of(source: Tensor, result: Tensor, dim: Any, keepdim: bool) -> Loop:
    """Build the loop over the source's elements, reduced along `dim` (None or empty: all)."""
    rank = source.dim()
    dims = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    reduced = {d % rank for d in dims} if rank else set()
    kept = [d for d in range(rank) if d not in reduced]
    out_bytes, in_bytes = result.dtype.itemsize, source.dtype.itemsize
    strides = [0] * rank
    for place, d in enumerate(range(rank) if keepdim and result.dim() == rank else kept):
        strides[d] = result.stride(place) * out_bytes if d in kept or source.shape[d] == 1 else 0
    address = source.storage_offset() * in_bytes % 64
    return make_loop(tuple(source.shape), tuple(strides), tuple(s * in_bytes for s in source.stride()), address)


def _register_place(name: str) -> None:
    by_shape = plain(name)

    @kernel(name)
    def place(self: Tensor, dim: int | None = None, keepdim: bool = False, **out: Tensor) -> Tensor:
        result = by_shape(self, dim, keepdim, **out)
        if self.numel() >= FEWEST_SPLIT and (dim is None or self.shape[dim] != 1):
            source = self.reshape(-1) if dim is None else self
            _stage(source, result, dim, keepdim and dim is not None, "indexed")
        return choose(result, self.numel() if dim is None else self.shape[dim] if self.dim() else 1, "argmax")


@kernel("count_nonzero.dim_IntList")
def count_nonzero(self: Tensor, dim: list[int]) -> Tensor:
    return (self if self.dtype == torch.bool else self != 0).sum(dim)


for _kind, _names in OPERATORS.items():
    for _name in _names.split():
        _register(_name, _kind)
for _name in ("argmax", "argmin", "argmax.out", "argmin.out"):
    _register_place(_name)


@kernel("_foreach_norm.Scalar")
def foreach_norm(self: list[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    if not _is_fast(self, ord):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in self]
    kind = torch.float64 if (dtype or self[0].dtype) == torch.float64 else torch.float32
    parts = torch.empty(len(self) * chunks(self), dtype=kind, device=self[0].device)
    outputs = [torch.empty((), dtype=dtype or t.dtype, device=t.device) for t in self]
    del parts
    return outputs


@kernel("_foreach_max")
def foreach_max(self: list[Any]) -> list[Any]:
    if not _is_fast(self, 2):
        return [t.max() for t in self]
    outputs = [torch.empty((), dtype=t.dtype, device=t.device) for t in self]
    torch.empty(len(self) * chunks(self), dtype=self[0].dtype, device=self[0].device)
    return outputs


def chunks(tensors: list[Tensor]) -> int:
    """Return the number of chunks of the largest tensor."""
    return max(-(-t.numel() // _CHUNK) for t in tensors)


def _is_fast(tensors: list[Any], order: Any) -> bool:
    first = tensors[0]
    return (
        float(order) in (1.0, 2.0, float("inf"))
        and first.dtype.is_floating_point
        and all(t.dtype == first.dtype and t.device == first.device and t.numel() for t in tensors)
        and all(t.is_contiguous() or is_dense(t) for t in tensors)
    )


def scan(count: int, dtype: torch.dtype, like: Tensor) -> None:
    """Allocate and free the storage of an inclusive scan."""
    scratch(scan_bytes(min(count, MOST_ITEMS), dtype.itemsize, primitive=dtype not in NOT_PRIMITIVE), like)
    for start in range(MOST_ITEMS, count, MOST_ITEMS):
        first = scratch(dtype.itemsize, like)
        scan(min(count - start, MOST_ITEMS), dtype, like)
        del first


@after_outputs("cumsum", "cumsum.out", "cumprod", "cumprod.out")
def cumulate(result: Tensor, self: Tensor, dim: int, **_: Any) -> list[Tensor]:
    if not self.dim() or not self.numel():
        return []
    source = self if self.dtype == result.dtype else torch.empty_like(self, dtype=result.dtype)
    target = contiguous(result)
    copy = contiguous(source)
    if self.numel() == self.shape[dim]:
        scan(self.numel(), result.dtype, self)
    return [source, target, copy]


@kernel("_logcumsumexp")
def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    result = torch.empty_like(self, memory_format=torch.contiguous_format)
    free_reversed(cumulate(result, self, dim))
    return result


@kernel("_cummax_helper", "_cummin_helper")
def cummax(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
    free_reversed([contiguous(values), contiguous(indices)])


# The launch configuration, without tensors


@lru_cache(maxsize=4096)
def make_loop(shape: tuple[int, ...], output: tuple[int, ...], input: tuple[int, ...], address: int) -> Loop:
    """Build a loop with dimensions sorted by stride (in bytes) and merged where they are contiguous."""
    order = _sorted_dimensions(shape, output, input)
    merged: list[tuple[int, int, int]] = []
    for size, out, stride in ((shape[d], output[d], input[d]) for d in order):
        last_size, last_out, last_stride = merged[-1] if merged else (0, 0, 0)
        is_one_run = last_size * last_out == out and last_size * last_stride == stride
        if merged and (1 in (last_size, size) or is_one_run):
            merged[-1] = (last_size * size, *((out, stride) if last_size == 1 else (last_out, last_stride)))
        else:
            merged.append((size, out, stride))
    sizes, outs, strides = zip(*merged, strict=True) if merged else ((), (), ())
    return Loop(tuple(sizes), tuple(outs), tuple(strides), address)


def _sorted_dimensions(shape: tuple[int, ...], output: tuple[int, ...], input: tuple[int, ...]) -> list[int]:
    """Sort by insertion, because the comparison can be ambiguous and the order then matters."""

    def compare(a: int, b: int) -> int:
        if (output[a] == 0) != (output[b] == 0):
            return 1 if output[b] == 0 else -1
        for strides in (output, input):
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return -1 if strides[a] < strides[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        place = i
        for j in range(i - 1, -1, -1):
            swap = compare(order[j], order[place])
            if swap < 0:
                break
            if swap > 0:
                order[j], order[place] = order[place], order[j]
                place = j
    return order


@lru_cache(maxsize=4096)
def staging_bytes(loop: Loop, element: Element, card: WarpLimits) -> tuple[tuple[int, int], ...]:
    """Return (buffer, semaphores) of each launch, (0, 0) if it needs none; loops beyond 32-bit offsets take several."""
    return tuple(_staging(part, element, card) for part in _within_32_bits(loop))


@lru_cache(maxsize=4096)
def fits_32_bits(loop: Loop) -> bool:
    """Whether all offsets fit 32 bits, so that one launch is enough."""
    return prod(loop.shape) <= INT32_MAX and all(
        1 + sum((size - 1) * stride for size, stride in zip(loop.shape, strides, strict=True)) <= INT32_MAX
        for strides in (loop.output, loop.input)
    )


def _within_32_bits(loop: Loop) -> Iterator[Loop]:
    if fits_32_bits(loop):
        yield loop
        return
    extents = [
        (size - 1) * max(out, stride) for size, out, stride in zip(loop.shape, loop.output, loop.input, strict=True)
    ]
    longest = max(range(len(extents)), key=lambda d: (extents[d], d))
    size = loop.shape[longest]
    for start, part in ((0, size // 2), (size // 2, size - size // 2)):
        shape = (*loop.shape[:longest], part, *loop.shape[longest + 1 :])
        yield from _within_32_bits(replace(loop, shape=shape, address=loop.address + start * loop.input[longest]))


def _staging(loop: Loop, element: Element, card: WarpLimits) -> tuple[int, int]:
    outputs = prod(size for size, stride in zip(loop.shape, loop.output, strict=True) if stride)
    inputs = prod(loop.shape) // outputs
    reduced = loop.output.count(0)
    along_input = reduced == len(loop.shape) or loop.input[0] < loop.input[reduced]
    width_limit, height_limit = (inputs, outputs) if along_input else (outputs, inputs)
    output_vector = 1
    if loop.input[0 if along_input else reduced] == element.scalar_bytes:
        if not along_input:
            output_vector, strides = 4, [s // element.scalar_bytes for d, s in enumerate(loop.input) if d != reduced]
            for number in (loop.address // element.scalar_bytes, loop.shape[reduced], *strides):
                while number % output_vector:
                    output_vector //= 2
            width_limit //= output_vector
        elif width_limit >= 128 and reduced == 1:
            width_limit //= element.vector
    # The threads of a block
    threads = element.max_threads // output_vector
    widest, highest = (last_power(limit) if limit < threads else threads for limit in (width_limit, height_limit))
    height = min(highest, threads // min(widest, card.warp))
    width = min(widest, threads // height)
    values = -(-inputs // (width if along_input else 1))
    if values < min(height * 16, MAX_VALUES_PER_THREAD):
        return 0, 0
    values = -(-inputs // ((width if along_input else 1) * height))
    step_output = 1 if along_input else width
    grid = -(-(outputs // output_vector) // step_output)
    target = card.multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if values < MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return 0, 0
    staged = outputs * blocks * (1 if along_input else width * output_vector)
    return staged * element.carried_bytes, 4 * grid


def last_power(number: int) -> int:
    """Return the largest power of two up to a number; 1 if it is not positive."""
    return 1 << (max(number, 1).bit_length() - 1)

"""Reductions: large ones, split over thread blocks, stage partial results in memory; some cast their input first.

The types that each operator reads and accumulates are listed below; `reduce_plan` has the launch configuration.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tonnage.hardware import Gpu
from tonnage.virtual.kernels.reduce_plan import (
    FEWEST_SPLIT,
    Element,
    Loop,
    WarpLimits,
    fits_32_bits,
    make_loop,
    staging_bytes,
)
from tonnage.virtual.kernels.registry import kernel, plain, scratch
from tonnage.virtual.kernels.values import choose, is_known
from tonnage.virtual.session import active

LOW_PRECISION = (torch.float16, torch.bfloat16)
# (input, result) -> the dtype it reads, its element sizes, and whether it can accumulate in the result.
Rule = Callable[[torch.Tensor, torch.Tensor], tuple[torch.dtype, Element, bool]]


@cache
def _card(gpu: Gpu) -> WarpLimits:
    return WarpLimits(gpu.sm_count, gpu.max_threads_per_sm, gpu.warp_size)


def _element(dtype: torch.dtype, carried_bytes: int, vector: int = 4) -> Element:
    return Element(dtype.itemsize, carried_bytes, vector, 256 if dtype == torch.complex128 else 512)


def _accumulator_bytes(dtype: torch.dtype) -> int:
    return {torch.float16: 4, torch.bfloat16: 4, torch.complex32: 8}.get(dtype, dtype.itemsize)


def _read_dtype(self: torch.Tensor, result: torch.Tensor) -> torch.dtype:
    """Half precision is reduced to float32 directly; others are cast to the result's dtype first."""
    if self.dtype in LOW_PRECISION and result.dtype == torch.float32:
        return self.dtype
    return result.dtype.to_complex() if self.is_complex() and not result.is_complex() else result.dtype


def _sum_rule(wide: bool, always_accumulates: bool = False) -> Rule:
    def rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
        dtype = _read_dtype(self, result)
        vector = 8 if wide and dtype.itemsize == 2 else 4
        accumulates = always_accumulates or dtype != result.dtype or dtype not in (*LOW_PRECISION, torch.complex32)
        return dtype, _element(dtype, _accumulator_bytes(dtype), vector), accumulates

    return rule


def _norm_rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
    dtype = _read_dtype(self, result)
    return dtype, _element(dtype, _accumulator_bytes(dtype.to_real())), dtype not in LOW_PRECISION


def _moment_rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
    dtype = _read_dtype(self, result)
    return dtype, _element(dtype, 32 if dtype == torch.float64 else 16, vector=2), False


def _same_rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
    return self.dtype, _element(self.dtype, self.dtype.itemsize), True


def _indexed_rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
    return self.dtype, _element(self.dtype, 16), False


def _pair_rule(self: torch.Tensor, result: torch.Tensor) -> tuple[torch.dtype, Element, bool]:
    return self.dtype, _element(self.dtype, 2 * self.dtype.itemsize), False


# Operators by rule; a dot separates the overload.
OPERATORS: tuple[tuple[Rule, str], ...] = (
    (_sum_rule(True), "sum.dim_IntList sum.IntList_out mean.dim mean.out"),
    (_sum_rule(False), "nansum nansum.out"),
    (_sum_rule(False, always_accumulates=True), "prod prod.dim_int prod.int_out"),
    (_norm_rule, "linalg_vector_norm linalg_vector_norm.out"),
    (_norm_rule, "norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.out norm.dtype_out"),
    (_moment_rule, "std.correction std.correction_out var.correction var.correction_out"),
    (_moment_rule, "var_mean.correction std_mean.correction"),
    (_same_rule, "all all.dim all.dims all.out all.dims_out all.all_out"),
    (_same_rule, "any any.dim any.dims any.out any.dims_out any.all_out"),
    (_same_rule, "amax amax.out amin amin.out max max.unary_out min min.unary_out"),
    (_indexed_rule, "max.dim max.dim_max min.dim min.dim_min"),
    (_pair_rule, "aminmax aminmax.out"),
)


def _register(name: str, rule: Rule) -> None:
    word, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, word), overload or "default")._schema
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    by_shape = plain(name)
    # For unknown values, checks hold and no flag is set.
    otherwise = {"all": True, "any": False}.get(word)

    def argument(word: str, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        place = places.get(word, len(given))
        return keywords.get(word, given[place] if place < len(given) else None)

    def reduce(*given: Any, **keywords: Any) -> Any:
        result = by_shape(*given, **keywords)
        self, first = given[0], result[0] if isinstance(result, tuple) else result
        if self.numel() >= FEWEST_SPLIT or self.dtype != first.dtype:
            dim, keepdim = argument("dim", given, keywords), argument("keepdim", given, keywords)
            _stage(self, first, dim, bool(keepdim), rule)
        if otherwise is not None and not is_known(first):
            active().stand_ins.assume(word, f"Of values that are not known, `{word}` is {otherwise}.")
            first.fill_(otherwise)
        elif rule is _indexed_rule and self.dim():
            choose(result[1], self.shape[argument("dim", given, keywords)], word)
        return result

    kernel(name)(reduce)


def _stage(self: torch.Tensor, result: torch.Tensor, dim: Any, keepdim: bool, rule: Rule) -> None:
    """Allocate what the reduction holds in addition to its result, in order."""
    dtype, element, accumulates = rule(self, result)
    source = self if dtype == self.dtype else torch.empty_like(self, dtype=dtype)
    if self.numel() < FEWEST_SPLIT:
        return
    loop = loop_of(source, result, dim, keepdim)
    card = _card(active().device.gpu)
    held = None
    if not accumulates and element.carried_bytes > result.dtype.itemsize and not fits_32_bits(loop):
        spans = (size * stride for size, stride in zip(loop.shape, loop.output, strict=True))
        held = scratch(max(result.dtype.itemsize, *spans) // result.dtype.itemsize * element.carried_bytes, self)
    for buffer_bytes, semaphore_bytes in staging_bytes(loop, element, card):
        buffer = scratch(buffer_bytes, self)
        semaphores = scratch(semaphore_bytes, self)
        del semaphores, buffer
    del held


def loop_of(source: torch.Tensor, result: torch.Tensor, dim: Any, keepdim: bool) -> Loop:
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
    def place(self: torch.Tensor, dim: int | None = None, keepdim: bool = False, **out: torch.Tensor) -> torch.Tensor:
        result = by_shape(self, dim, keepdim, **out)
        if self.numel() >= FEWEST_SPLIT and (dim is None or self.shape[dim] != 1):
            source = self.reshape(-1) if dim is None else self
            _stage(source, result, dim, keepdim and dim is not None, _indexed_rule)
        return choose(result, self.numel() if dim is None else self.shape[dim] if self.dim() else 1, "argmax")


@kernel("count_nonzero.dim_IntList")
def count_nonzero(self: torch.Tensor, dim: list[int]) -> torch.Tensor:
    return (self if self.dtype == torch.bool else self != 0).sum(dim)


for _rule, _names in OPERATORS:
    for _name in _names.split():
        _register(_name, _rule)
for _name in ("argmax", "argmin", "argmax.out", "argmin.out"):
    _register_place(_name)

"""Attention of one new token per sequence over its pages; bound by memory bandwidth.

One program reads one KV head of one sequence, or one of `splits` parts of it if sequences are few, for all query
heads of the group. The number of splits depends only on the batch size, so that a captured graph serves all lengths.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.common import attend, jit, next_power_of_2, read_pages, tl, wide

LOG2_E = 1.4426950408889634
MOST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4  # enough to saturate memory bandwidth


def attend_decode_reference(
    query: Tensor, layer: LayerCache, tables: Tensor, lengths: Tensor, *, scale: float, window: int = 0,
    soft_cap: float = 0.0, order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of queries [D, H, hd] over `lengths` keys in the blocks of `tables`; rows start in this `order`."""
    most = int(lengths.max()) if len(lengths) else 0
    keys, values = read_pages(layer, tables[:, : -(-most // layer.block_size)], wide(query.dtype))
    ages = lengths[:, None] - 1 - torch.arange(keys.shape[1], device=query.device)
    visible = (ages >= 0) & (ages < window) if window else ages >= 0
    return attend(query.unsqueeze(1), keys, values, visible.unsqueeze(1), scale=scale, soft_cap=soft_cap).squeeze(1)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A program's tuning: keys per tile, warps, and pipeline stages."""

    tile: int
    warps: int
    stages: int


def decode_tuning(head_dim: int) -> Tuning:
    """Return the tuning; for 128 the best of nine on an H200 with mixed lengths: 4.18 TB/s in BF16, 2.52 in FP8."""
    return Tuning(tile=32, warps=4, stages=3) if head_dim > 128 else Tuning(tile=64, warps=2, stages=5)


def count_splits(rows: int, kv_heads: int, processors: int) -> int:
    """Return the splits per sequence: one if the batch fills the card, else a power of two that does."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads))
    return min(next_power_of_2(wanted), MOST_SPLITS)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def attention_constants(
    query: Tensor, out: Tensor, layer: LayerCache, tuning: Tuning, scale: float, window: int, soft_cap: float
) -> dict[str, Any]:
    """Return the compile-time arguments that both attention kernels take."""
    return {
        "QUERY_STRIDE": query.stride(0), "OUT_STRIDE": out.stride(0), "BLOCK_STRIDE": layer.keys.stride(0),
        "TOKEN_STRIDE": layer.keys.stride(1),
        "SCALE_STRIDE": layer.key_scales.stride(0) if layer.key_scales is not None else 0,
        "SCORE_SCALE": scale if soft_cap else scale * LOG2_E, "SOFT_CAP": soft_cap, "WINDOW": window,
        "FP8_CACHE": layer.key_scales is not None, "KV_HEADS": layer.keys.shape[2], "HEAD_DIM": query.shape[2],
        "PADDED_DIM": next_power_of_2(query.shape[2]), "PAGE": layer.block_size, "TILE": tuning.tile,
        "num_warps": tuning.warps, "num_stages": tuning.stages,
    }  # fmt: skip


def attend_decode_triton(
    query: Tensor, layer: LayerCache, tables: Tensor, lengths: Tensor, *, scale: float, window: int = 0,
    soft_cap: float = 0.0, order: Tensor | None = None, splits: int = 0, tuning: Tuning | None = None,
) -> Tensor:  # fmt: skip
    """Like `attend_decode_reference`, in one pass over the pages, and a second to merge splits if there are several."""
    rows, heads, head_dim = query.shape
    kv_heads = layer.keys.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    splits = splits or count_splits(rows, kv_heads, _processors(query.device))
    narrow = layer.key_scales is not None
    parts, sizes = out, out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=query.device)
        sizes = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    _decode_kernel[(kv_heads, rows, splits)](
        query, layer.keys, layer.values.view(torch.uint16) if narrow else layer.values,
        layer.key_scales if narrow else query, layer.value_scales if narrow else query, tables, lengths,
        lengths if order is None else order, parts, sizes, tables.stride(0),
        **attention_constants(query, out, layer, tuning or decode_tuning(head_dim), scale, window, soft_cap),
        ORDERED=order is not None, SPLITS=splits, HEADS=heads, ROWS=max(16, next_power_of_2(heads // kv_heads)),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, rows)](
            parts, sizes, out, OUT_STRIDE=out.stride(0), SPLITS=splits, HEADS=heads, HEAD_DIM=head_dim,
            PADDED_DIM=next_power_of_2(head_dim), num_warps=2,
        )  # fmt: skip
    return out


@jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """Return scores for exp2: cap × tanh(score / cap), computed with exp2. Infinite powers give ±1."""
    power = tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
    return (1.0 - 2.0 / (power + 1.0)) * (SOFT_CAP * 1.4426950408889634)


@jit
def widened_for_fp8(rows_q):
    """Convert queries for products with FP8: FP16 holds it exactly, and the conversion is faster than to BF16."""
    return rows_q.to(tl.float16) if rows_q.dtype == tl.bfloat16 else rows_q


@jit
def unpacked(pairs):
    """Unpack e4m3 pairs as FP16 / 256, since shared memory transposes values for tensor cores by 16 bits, never by 8."""
    even = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
    odd = (pairs & 0x8000) | ((pairs & 0x7F00) >> 1)
    return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)


@jit
def scales_of_tile(
    key_scales, value_scales, table, tokens, end, kv_head,
    SCALE_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Load the scales of these tokens' keys and values; 0 from `end` on."""
    inside = tokens < end
    pages = tl.load(table + tokens // PAGE, mask=inside, other=0).to(tl.int64)
    at = pages * SCALE_STRIDE + (tokens % PAGE) * KV_HEADS + kv_head
    return tl.load(key_scales + at, mask=inside, other=0.0), tl.load(value_scales + at, mask=inside, other=0.0)


@jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "lengths", "order"])
def _decode_kernel(
    query, keys, values, key_scales, value_scales, tables, lengths, order, parts, sizes, table_stride,
    QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, SCORE_SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    FP8_CACHE: tl.constexpr, ORDERED: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if ORDERED:
        row = tl.load(order + row).to(tl.int64)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    used = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    rows_q = tl.load(query + row * QUERY_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0)

    # This program's part of the sequence: whole tiles, so that each holds a visible key.
    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    begin = first // TILE * TILE
    span = tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE) * TILE
    start = begin + split * span
    end = tl.minimum(start + span, length)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    table = tables + row * table_stride
    if FP8_CACHE:
        rows_q = widened_for_fp8(rows_q)
        halves = tl.arange(0, PADDED_DIM // 2)
        mixed_even = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
        mixed_odd = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
        key_scale, value_scale = scales_of_tile(
            key_scales, value_scales, table, start + lanes, end, kv_head, SCALE_STRIDE, KV_HEADS, PAGE
        )  # fmt: skip
    for at in range(start, end, TILE):
        tokens = at + lanes
        seen = tokens < end
        pages = tl.load(table + tokens // PAGE, mask=seen, other=0).to(tl.int64)
        places = pages * BLOCK_STRIDE + (tokens % PAGE) * TOKEN_STRIDE + kv_head * HEAD_DIM
        inside_k = seen[None, :]
        inside_v = seen[:, None]
        if HEAD_DIM != PADDED_DIM:
            inside_k = inside_k & (dims < HEAD_DIM)[:, None]
            inside_v = inside_v & ((halves < HEAD_DIM // 2) if FP8_CACHE else (dims < HEAD_DIM))[None, :]
        key = tl.load(keys + places[None, :] + dims[:, None], mask=inside_k, other=0.0)
        if FP8_CACHE:
            places_v = pages * (BLOCK_STRIDE // 2) + (tokens % PAGE) * (TOKEN_STRIDE // 2) + kv_head * (HEAD_DIM // 2)
            pairs = tl.load(values + places_v[:, None] + halves[None, :], mask=inside_v, other=0)
        else:
            value = tl.load(values + places[:, None] + dims[None, :], mask=inside_v, other=0.0)
        if FP8_CACHE:  # too small for the pipeline, so prefetch them one tile ahead
            next_key_scale, next_value_scale = scales_of_tile(
                key_scales, value_scales, table, tokens + TILE, end, kv_head, SCALE_STRIDE, KV_HEADS, PAGE
            )  # fmt: skip
        scores = tl.dot(rows_q, key.to(rows_q.dtype), input_precision="ieee") * SCORE_SCALE
        if FP8_CACHE:
            scores *= key_scale.to(tl.float32)[None, :]
        if SOFT_CAP > 0:
            scores = capped(scores, SOFT_CAP)
        shown = seen & (tokens >= first) if WINDOW > 0 else seen
        scores = tl.where(shown[None, :], scores, float("-inf"))
        now_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - now_best)
        powers = tl.exp2(scores - now_best[:, None])
        total = total * shrink + tl.sum(powers, 1)
        if FP8_CACHE:
            powers *= (value_scale.to(tl.float32) * 256.0)[None, :]
            key_scale, value_scale = next_key_scale, next_value_scale
        if FP8_CACHE:
            even, odd = unpacked(pairs)
            mixed_even = tl.dot(
                powers.to(rows_q.dtype), even.to(rows_q.dtype), mixed_even * shrink[:, None], input_precision="ieee"
            )
            mixed_odd = tl.dot(
                powers.to(rows_q.dtype), odd.to(rows_q.dtype), mixed_odd * shrink[:, None], input_precision="ieee"
            )
        else:
            mixed = tl.dot(powers.to(rows_q.dtype), value, mixed * shrink[:, None], input_precision="ieee")
        best = now_best

    if FP8_CACHE:
        mixed = tl.interleave(mixed_even, mixed_odd)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # zeros if no key was seen
    if SPLITS == 1:
        at_out = row * OUT_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(parts + at_out, mixed.to(parts.dtype.element_ty), mask=used)
    else:
        part = (row * HEADS + heads) * SPLITS + split
        size = best + tl.log2(tl.where(total > 0, total, 1.0))  # −inf if no key was seen
        tl.store(sizes + part, size, mask=members < GROUP)
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], mixed, mask=used & (start < end))


@jit
def _merge_kernel(
    parts, sizes, out, OUT_STRIDE: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    part = (row * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    size = tl.load(sizes + part)
    largest = tl.max(size, 0)
    share = tl.exp2(size - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(share, 0)
    wanted = (size > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    mixed = tl.load(parts + part[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
    merged = tl.sum(mixed * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * OUT_STRIDE + head * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)

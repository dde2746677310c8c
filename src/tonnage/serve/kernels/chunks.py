"""Causal attention of prompt chunks over their pages; compute-bound.

One program handles some tokens of one chunk for all query heads of a KV head, so that keys are read once per group.
Programs are laid out flat over all chunks, slightly too many: each finds its chunk on the device.
"""

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.common import attend, jit, next_power_of_2, read_pages, tl, wide
from tonnage.serve.kernels.decode import Tuning, attention_constants, capped, scales_of_tile, widened_for_fp8


def attend_chunks_reference(
    query: Tensor, layer: LayerCache, tables: Tensor, lengths: Tensor, chunk_starts: Tensor, longest_chunk: int, *,
    scale: float, window: int = 0, soft_cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute attention of queries [N, H, hd]: row i of chunk p is at position lengths[p] − its length + i."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = chunk_starts.tolist()
    for table, length, start, end in zip(tables, lengths.tolist(), starts, starts[1:], strict=False):
        assert end - start <= longest_chunk
        keys, values = read_pages(layer, table[None, : -(-length // layer.block_size)], wide(query.dtype))
        positions = torch.arange(length - (end - start), length, device=query.device)
        ages = positions[:, None] - torch.arange(keys.shape[1], device=query.device)
        visible = (ages >= 0) & (ages < window) if window else ages >= 0
        out[start:end] = attend(
            query[None, start:end], keys, values, visible[None], scale=scale, soft_cap=soft_cap
        ).squeeze(0)
    return out


def chunks_tuning(head_dim: int, dtype: torch.dtype) -> tuple[int, Tuning]:
    """Return the rows per program, and its tuning."""
    if dtype.itemsize > 2:  # no tensor cores, and twice the shared memory
        return 64, Tuning(tile=32, warps=8, stages=2)
    if head_dim > 128:
        return 128, Tuning(tile=32, warps=8, stages=3)
    return 128, Tuning(tile=64, warps=8, stages=5)


def attend_chunks_triton(
    query: Tensor, layer: LayerCache, tables: Tensor, lengths: Tensor, chunk_starts: Tensor, longest_chunk: int, *,
    scale: float, window: int = 0, soft_cap: float = 0.0, tuning: tuple[int, Tuning] | None = None,
) -> Tensor:  # fmt: skip
    """Like `attend_chunks_reference`, tile by tile."""
    count, heads, head_dim = query.shape
    kv_heads = layer.keys.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if count == 0:
        return out
    narrow = layer.key_scales is not None
    rows, how = tuning or chunks_tuning(head_dim, query.dtype)
    rows = max(rows, next_power_of_2(heads // kv_heads))
    tokens = rows // (heads // kv_heads)
    _chunks_kernel[(kv_heads, count // tokens + len(lengths))](
        query, layer.keys, layer.values, layer.key_scales if narrow else query, layer.value_scales if narrow else query,
        tables, lengths, chunk_starts, out, tables.stride(0), len(lengths),
        **attention_constants(query, out, layer, how, scale, window, soft_cap), GROUP=heads // kv_heads, ROWS=rows,
        TOKENS=tokens,
    )  # fmt: skip
    return out


@jit
def _find_chunk(starts, chunks, program, TOKENS: tl.constexpr):
    """Return the chunk of a program: chunk p has the programs from starts[p] // TOKENS + p on, enough for any p."""
    lanes = tl.arange(0, 256)
    before = tl.zeros([256], tl.int32)
    for base in range(0, chunks, 256):
        chunk = base + lanes
        start = tl.load(starts + chunk, mask=chunk < chunks, other=0)
        before += ((chunk < chunks) & (start // TOKENS + chunk <= program)).to(tl.int32)
    return tl.sum(before, 0) - 1


@jit
def _sweep(
    rows_q, keys, values, key_scales, value_scales, table, kv_head, positions, best, total, mixed, start, end,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SCORE_SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, FP8_CACHE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Loop over the keys from `start` to `end`. EDGE: not every row sees every key of a tile."""
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    for at in range(start, end, TILE):
        tokens = at + lanes
        inside = tokens < end
        pages = tl.load(table + tokens // PAGE, mask=inside, other=0).to(tl.int64)
        places = pages * BLOCK_STRIDE + (tokens % PAGE) * TOKEN_STRIDE + kv_head * HEAD_DIM
        inside_k = inside[None, :]
        inside_v = inside[:, None]
        if HEAD_DIM != PADDED_DIM:
            inside_k = inside_k & (dims < HEAD_DIM)[:, None]
            inside_v = inside_v & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + places[None, :] + dims[:, None], mask=inside_k, other=0.0)
        value = tl.load(values + places[:, None] + dims[None, :], mask=inside_v, other=0.0)
        scores = tl.dot(rows_q, key.to(rows_q.dtype), input_precision="ieee") * SCORE_SCALE
        if FP8_CACHE:
            key_scale, value_scale = scales_of_tile(
                key_scales, value_scales, table, tokens, end, kv_head, SCALE_STRIDE, KV_HEADS, PAGE
            )
            scores *= key_scale.to(tl.float32)[None, :]
        if SOFT_CAP > 0:
            scores = capped(scores, SOFT_CAP)
        if EDGE:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        now_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key has no maximum, and −inf − −inf is NaN.
        anchor = tl.where(now_best > float("-inf"), now_best, 0.0) if EDGE else now_best
        shrink = tl.exp2(best - anchor)
        powers = tl.exp2(scores - anchor[:, None])
        total = total * shrink + tl.sum(powers, 1)
        if FP8_CACHE:
            powers *= (value_scale.to(tl.float32) * 256.0)[None, :]  # keeps clear of FP16 underflow
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(powers.to(rows_q.dtype), value.to(rows_q.dtype), mixed, input_precision="ieee")
        best = now_best
    return best, total, mixed


@jit(do_not_specialize=["table_stride", "chunks"], do_not_specialize_on_alignment=["tables", "lengths", "chunk_starts"])
def _chunks_kernel(
    query, keys, values, key_scales, value_scales, tables, lengths, chunk_starts, out, table_stride, chunks,
    QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, SCORE_SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    FP8_CACHE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    chunk = _find_chunk(chunk_starts, chunks, program, TOKENS).to(tl.int64)
    chunk_start = tl.load(chunk_starts + chunk)
    chunk_length = tl.load(chunk_starts + chunk + 1) - chunk_start
    # The last tokens of a chunk, which see most keys, come first.
    block = tl.cdiv(chunk_length, TOKENS) - 1 - (program - chunk_start // TOKENS - chunk.to(tl.int32))
    if block < 0:
        return
    length = tl.load(lengths + chunk)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    tokens = block * TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    known = (rows < TOKENS * GROUP) & (tokens < chunk_length)
    used = known[:, None] & (dims < HEAD_DIM)[None, :]
    places = (chunk_start + tokens).to(tl.int64)
    at_query = places * QUERY_STRIDE + heads * HEAD_DIM
    rows_q = tl.load(query + at_query[:, None] + dims[None, :], mask=used, other=0.0)

    if FP8_CACHE:
        rows_q = widened_for_fp8(rows_q)

    before = length - chunk_length
    positions = before + tl.minimum(tokens, chunk_length - 1)
    lowest = before + block * TOKENS
    end = tl.minimum(lowest + TOKENS, length)
    # Tiles that all rows see completely need no mask, if there is no window.
    whole = (lowest + 1) // TILE * TILE
    start = whole * 0
    if WINDOW > 0:
        start = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        whole = start
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    table = tables + chunk * table_stride
    if WINDOW == 0:
        best, total, mixed = _sweep(
            rows_q, keys, values, key_scales, value_scales, table, kv_head, positions, best, total, mixed, start, whole,
            BLOCK_STRIDE, TOKEN_STRIDE, SCALE_STRIDE, SCORE_SCALE, SOFT_CAP, WINDOW, FP8_CACHE, KV_HEADS, HEAD_DIM,
            PADDED_DIM, PAGE, TILE, False,
        )  # fmt: skip
    best, total, mixed = _sweep(
        rows_q, keys, values, key_scales, value_scales, table, kv_head, positions, best, total, mixed, whole, end,
        BLOCK_STRIDE, TOKEN_STRIDE, SCALE_STRIDE, SCORE_SCALE, SOFT_CAP, WINDOW, FP8_CACHE, KV_HEADS, HEAD_DIM,
        PADDED_DIM, PAGE, TILE, True,
    )  # fmt: skip
    mixed = mixed / (tl.where(total > 0, total, 1.0) * (256.0 if FP8_CACHE else 1.0))[:, None]
    at_out = places * OUT_STRIDE + heads * HEAD_DIM
    tl.store(out + at_out[:, None] + dims[None, :], mixed.to(out.dtype.element_ty), mask=used)

"""Between projection and attention: per-head norm of queries and keys, rotary embedding, and writing the pages.

An FP8 cache keeps one scale per token and head, from its largest value. Queries are returned in a new tensor: its
rows are contiguous, and no program reads what another has already rotated.
"""

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.common import jit, next_power_of_2, tl, wide

LARGEST_FP8 = 448.0
LEAST_SCALE = 1e-12  # for a token of zeros
_HEADS_PER_PROGRAM = 8


def store_reference(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, slots: Tensor, layer: LayerCache, *, cos: Tensor,
    sin: Tensor, query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write keys and values [T, K, hd] to their slots; return the queries [T, H, hd] ready for attention.

    `cos` and `sin` are FP32 [positions, half of the rotary dim]. Halves are rotated against each other, as in Llama;
    dimensions beyond the rotary dim are unchanged. A norm's weight has `norm_offset` added (Gemma: 1).
    """
    turns = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    turned = _turn(_norm(query, query_norm, eps, norm_offset), *turns).to(query.dtype)
    _write(layer.keys, layer.key_scales, slots, _turn(_norm(key, key_norm, eps, norm_offset), *turns))
    _write(layer.values, layer.value_scales, slots, value.to(wide(value.dtype)))
    return turned


def _norm(rows: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    rows = rows.to(wide(rows.dtype))
    if weight is None:
        return rows
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (weight.to(rows.dtype) + offset)


def _turn(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    left, right, rest = rows.split((half, half, rows.shape[-1] - 2 * half), dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1).to(rows.dtype)


def _write(pages: Tensor, scales: Tensor | None, slots: Tensor, rows: Tensor) -> None:
    block, offset = slots // pages.shape[1], slots % pages.shape[1]
    if scales is not None:
        scale = (rows.abs().amax(-1) * (1.0 / LARGEST_FP8)).clamp(min=LEAST_SCALE).to(scales.dtype)
        scales[block, offset] = scale
        rows = (rows / scale.to(rows.dtype).unsqueeze(-1)).clamp(-LARGEST_FP8, LARGEST_FP8)
    pages[block, offset] = rows.to(pages.dtype)


def store_triton(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, slots: Tensor, layer: LayerCache, *, cos: Tensor,
    sin: Tensor, query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Like `store_reference`, in one launch: a program handles eight heads of one token's query, key or value."""
    count, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    turned = torch.empty((count, heads, head_dim), dtype=query.dtype, device=query.device)
    if count == 0:
        return turned
    query_blocks, kv_blocks = (-(-number // _HEADS_PER_PROGRAM) for number in (heads, kv_heads))
    narrow = layer.key_scales is not None
    _store_kernel[(count, query_blocks + 2 * kv_blocks)](
        query, key, value, turned, layer.keys, layer.values, layer.key_scales if narrow else query,
        layer.value_scales if narrow else query, positions, slots, cos, sin,
        query if query_norm is None else query_norm, key if key_norm is None else key_norm,
        QUERY_STRIDE=query.stride(0), KEY_STRIDE=key.stride(0), VALUE_STRIDE=value.stride(0),
        BLOCK_STRIDE=layer.keys.stride(0), TOKEN_STRIDE=layer.keys.stride(1),
        SCALE_STRIDE=layer.key_scales.stride(0) if layer.key_scales is not None else 0, HEADS=heads, KV_HEADS=kv_heads,
        QUERY_BLOCKS=query_blocks, KV_BLOCKS=kv_blocks, HALF=cos.shape[-1], HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim), PAGE=layer.block_size, BLOCK=_HEADS_PER_PROGRAM,
        QUERY_NORM=query_norm is not None, KEY_NORM=key_norm is not None, FP8_CACHE=narrow, EPS=eps, OFFSET=norm_offset,
        num_warps=4,
    )  # fmt: skip
    return turned


@jit
def _normed_and_turned(
    rows, heads, dims, inside, weight, cos, sin, position,
    HALF: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Return heads of one token in FP32. Each number is read with its partner in the other half."""
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    at = heads[:, None] * HEAD_DIM
    x = tl.load(rows + at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(rows + at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        size = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + EPS)
        known = dims < HEAD_DIM
        x = x * size[:, None] * (tl.load(weight + dims, mask=known, other=0.0).to(tl.float32) + OFFSET)[None, :]
        y = y * size[:, None] * (tl.load(weight + partner, mask=known, other=0.0).to(tl.float32) + OFFSET)[None, :]
    angle = position * HALF + tl.where(dims < HALF, dims, dims - HALF)
    turning = dims < 2 * HALF
    by_cos = tl.load(cos + angle, mask=turning, other=1.0).to(tl.float32)
    by_sin = tl.load(sin + angle, mask=turning, other=0.0).to(tl.float32)
    by_sin = tl.where(dims < HALF, -by_sin, by_sin)
    return x * by_cos[None, :] + y * by_sin[None, :]


@jit
def _to_page(
    pages, scales, x, slot, heads, dims, inside,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, FP8_CACHE: tl.constexpr,
):  # fmt: skip
    block = slot // PAGE
    offset = slot % PAGE
    if FP8_CACHE:
        scale = tl.maximum(tl.max(tl.abs(x), 1) * (1.0 / 448.0), 1e-12).to(scales.dtype.element_ty)
        tl.store(scales + block * SCALE_STRIDE + offset * KV_HEADS + heads, scale, mask=heads < KV_HEADS)
        x = tl.minimum(tl.maximum(x / scale.to(tl.float32)[:, None], -448.0), 448.0)
    at = block * BLOCK_STRIDE + offset * TOKEN_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pages + at, x.to(pages.dtype.element_ty), mask=inside)


@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _store_kernel(
    query, key, value, turned, keys, values, key_scales, value_scales, positions, slots, cos, sin, query_norm, key_norm,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
    FP8_CACHE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    lanes = tl.arange(0, BLOCK)
    known = (dims < HEAD_DIM)[None, :]
    if part < QUERY_BLOCKS:
        heads = part * BLOCK + lanes
        inside = (heads < HEADS)[:, None] & known
        position = tl.load(positions + token).to(tl.int64)
        x = _normed_and_turned(
            query + token * QUERY_STRIDE, heads, dims, inside, query_norm, cos, sin, position,
            HALF, HEAD_DIM, QUERY_NORM, EPS, OFFSET,
        )  # fmt: skip
        at = token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(turned + at, x.to(turned.dtype.element_ty), mask=inside)
    elif part < QUERY_BLOCKS + KV_BLOCKS:
        heads = (part - QUERY_BLOCKS) * BLOCK + lanes
        inside = (heads < KV_HEADS)[:, None] & known
        position = tl.load(positions + token).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        x = _normed_and_turned(
            key + token * KEY_STRIDE, heads, dims, inside, key_norm, cos, sin, position,
            HALF, HEAD_DIM, KEY_NORM, EPS, OFFSET,
        )  # fmt: skip
        _to_page(
            keys, key_scales, x, slot, heads, dims, inside,
            BLOCK_STRIDE, TOKEN_STRIDE, SCALE_STRIDE, KV_HEADS, HEAD_DIM, PAGE, FP8_CACHE,
        )  # fmt: skip
    else:
        heads = (part - QUERY_BLOCKS - KV_BLOCKS) * BLOCK + lanes
        inside = (heads < KV_HEADS)[:, None] & known
        slot = tl.load(slots + token).to(tl.int64)
        at = token * VALUE_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :]
        x = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
        _to_page(
            values, value_scales, x, slot, heads, dims, inside,
            BLOCK_STRIDE, TOKEN_STRIDE, SCALE_STRIDE, KV_HEADS, HEAD_DIM, PAGE, FP8_CACHE,
        )  # fmt: skip

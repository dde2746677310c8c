"""Allocations of each attention backend: outputs, statistics, accumulators and workspaces, in the order of the host
code.

Flash attention and the efficient (CUTLASS) kernels follow PyTorch's source; cuDNN is closed, so its workspaces follow
measurements on an H200 with cuDNN 9.19. `attention_choice` selects the backend.
"""

from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.virtual.kernels.attention_choice import MATH, choose_attention
from tonnage.virtual.kernels.library_sizes import attention_data, cudnn_backward_bytes, cudnn_forward_bytes
from tonnage.virtual.kernels.registry import free_reversed, kernel, scratch, strides_of
from tonnage.virtual.session import active

Tensors = tuple[Any, ...]
_HALF = (torch.float16, torch.bfloat16)


def _device() -> Any:
    return active().device


def round_up(value: int, multiple: int = 128) -> int:
    return -(-value // multiple) * multiple


def floats(like: Tensor, *shape: int) -> Tensor:
    """Allocate an uninitialized float32 tensor on the same device."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


# The limit of a launch's second and third grid dimensions, which the kernels use for heads and sequences.
LARGEST_GRID = 65535


def _check_launch(*counts: int) -> None:
    """Raise CUDA's error for a grid that is too large: real runs with more sequences fail here, too."""
    if max(counts) > LARGEST_GRID:
        raise RuntimeError("CUDA error: invalid configuration argument")


def flash_splits(blocks: int, slots: int, key_blocks: int, most: int = 128) -> int:
    """Return how often keys are split to keep the card busy (`slots` is twice the SM count)."""
    if blocks >= 0.8 * slots:
        return 1
    counts = range(1, min(most, slots, key_blocks) + 1)
    eligible = [n for n in counts if n == 1 or ceil(key_blocks / n) != ceil(key_blocks / (n - 1))]
    waves = {n: blocks * n / slots for n in eligible}
    efficiency = {n: waves[n] / ceil(waves[n]) for n in eligible}
    best = max(efficiency.values(), default=0.0)
    return next((n for n in eligible if efficiency[n] >= 0.85 * best), 1)


def split_accumulators(
    like: Tensor, sizes: tuple[int, int, int, int], width: int, processors: int, splits: int = 0
) -> list[Tensor]:
    """Allocate partial outputs if few queries meet many keys and these are split. `sizes`: batch, heads, queries, keys."""
    batch, heads, queries, keys = sizes
    if splits < 1:
        keys_per_block = 256 if width <= 64 else 128 if width <= 128 else 64
        splits = flash_splits(batch * heads * ceil(queries / 64), 2 * processors, ceil(keys / keys_per_block))
    if splits <= 1:
        return []
    statistics = floats(like, splits, batch, heads, queries)
    return [floats(like, splits, batch, heads, queries, _rounded_width(width)), statistics]


def backward_accumulators(
    query: Tensor, sequences: int | None, deterministic: bool, processors: int
) -> tuple[Tensor, Tensor]:
    """Allocate the softmax sums, and the sum of the queries' gradients. `sequences` is None for a batch."""
    heads, width = query.shape[-2], _rounded_width(query.shape[-1])
    if sequences is None:
        batch, rows = query.shape[0], round_up(query.shape[1])
        sums, shape = floats(query, batch, heads, rows), [batch, rows, heads, width]
    else:
        batch, rows = sequences, query.shape[0] + 128 * sequences  # rows between the sums of two sequences
        sums, shape = floats(query, heads, rows), [rows, heads, width]
    if deterministic:  # every SM adds to its own accumulator
        shape = [ceil(processors / (batch * heads)), *shape]
    return sums, floats(query, *shape)


def _rounded_width(width: int) -> int:
    return round_up(width, 32 if width <= 128 else 64)


def _flash(
    query: Any, key: Any, dropout: float, debug: bool, windowed: bool, ends: Any = None, longest: Tensors = (0, 0)
) -> Tensors:
    """Allocate for inputs of shape (batch, length, heads, width), or (tokens, heads, width) of sequences with ends.

    Keys of sequences may be paged.
    """
    dense, (heads, width), key_heads = ends is None, query.shape[-2:], key.shape[-2]
    batch, queries, keys = (*query.shape[:2], key.shape[1]) if dense else (ends.numel() - 1, *longest)
    swapped = queries == 1 and heads > key_heads and not windowed and dropout == 0
    if swapped:  # one query: the heads that share keys become its length
        query = query.reshape(batch, key_heads, heads // key_heads, width).transpose(1, 2)
        query = query if dense else query.reshape(-1, key_heads, width)
        queries, heads = heads // key_heads, key_heads
    out = torch.empty_like(query)
    statistics = floats(query, batch, heads, queries) if dense else floats(query, heads, query.shape[0])
    if dense and _device().torch_version >= (2, 2):  # the first version with FlashAttention 2
        _check_launch(batch, heads)
    softmax = query.new_empty(batch, heads, round_up(queries), round_up(keys)) if debug else None
    may_split = dropout == 0 and (dense or swapped or key.dim() == 4)
    sizes, processors = (batch, heads, queries, keys), _device().gpu.sm_count
    parts = split_accumulators(query, sizes, width, processors) if may_split else []
    if _device().torch_version < (2, 7):
        state, unused = _seed(), _seed()
    else:
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty((), dtype=torch.uint64, device=query.device)
        if dropout > 0:
            state = torch.empty(2, dtype=torch.uint64, device=query.device)  # allocated again
    if swapped and dense:
        out = out.transpose(1, 2).reshape(batch, 1, heads * queries, width)
        statistics = statistics.reshape(batch, heads * queries, 1)
    elif swapped:
        out = out.reshape(batch, queries, heads, width).transpose(1, 2).reshape(batch, heads * queries, width)
        statistics = statistics.reshape(heads * queries, batch)
    free_reversed(parts)
    return out, statistics, state, unused, softmax


@kernel("_flash_attention_forward")
def flash_attention_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, window_size_left: int | None = None, window_size_right: int | None = None,
    alibi_slopes: Any = None, **_: Any,
) -> Tensors:  # fmt: skip
    windows = (window_size_left, window_size_right)
    windowed = alibi_slopes is not None or any(size is not None and size >= 0 for size in windows)
    return _flash(query, key, dropout_p, return_debug_mask, windowed and cum_seq_q is None, cum_seq_q, (max_q, max_k))


@kernel("_scaled_dot_product_flash_attention")
def scaled_dot_product_flash_attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> Tensors:  # fmt: skip
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    out, statistics, state, unused, softmax = _flash(q, k, dropout_p, return_debug_mask, windowed=False)
    return out.transpose(1, 2), statistics, None, None, query.shape[2], key.shape[2], state, unused, softmax


@kernel("_flash_attention_backward")
def flash_attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, *_: Any, **__: Any
) -> Tensors:
    """Allocate gradients, then accumulators; shared keys get a gradient per head, summed at the end."""
    grad, out = grad_out.contiguous(), out.contiguous()
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    fixed = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    sequences = None if cum_seq_q is None else cum_seq_q.numel() - 1
    softmax_sum, dq_sum = backward_accumulators(query, sequences, fixed, _device().gpu.sm_count)
    if key.shape[-2] != query.shape[-2]:
        free_reversed([key.new_empty(*key.shape[:-2], *query.shape[-2:]) for _ in range(2)])
    del dq_sum, softmax_sum, out, grad
    return dq, dk, dv


@kernel("_scaled_dot_product_flash_attention_backward")
def scaled_dot_product_flash_attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, *_: Any, **__: Any
) -> Tensors:
    if grad_out is None:
        return None, None, None
    inputs = [t.transpose(1, 2) for t in (grad_out, query, key, value, out)]
    return tuple(t.transpose(1, 2) for t in flash_attention_backward(*inputs, logsumexp, cum_seq_q))


@kernel("_safe_softmax")
def safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of math attention. Since 2.5, fully masked rows are zeros; before, it was a plain softmax."""
    out = torch.softmax(self, dim, dtype=dtype)
    if _device().torch_version < (2, 5):
        return out
    hidden = torch.isneginf(self)
    rows = hidden.all(dim, keepdim=True)
    zero = torch.scalar_tensor(0.0, dtype=out.dtype, device=out.device)
    torch.where(rows, zero, out, out=out)
    del zero, rows, hidden
    return out


def _efficient(query: Any, value: Any, want_statistics: bool, queries: int) -> tuple[Tensor, Tensor]:
    """Allocate for (batch, length, heads, width). Statistics are padded to 32 queries; wide heads accumulate in float32."""
    batch, length, heads, width = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1])
    statistics = floats(query, batch, heads, round_up(queries, 32) if want_statistics else 0)
    if query.dtype in _HALF and max(width, value.shape[-1]) > 128:
        floats(query, *out.shape)  # the accumulator
    if _device().torch_version < (2, 8):  # since 2.8, large batches are processed in pieces
        _check_launch(batch, heads)
    return out, statistics


def _seed() -> Tensor:
    return torch.zeros((), dtype=torch.int64)  # on the host, unless a CUDA graph is captured


@kernel("_scaled_dot_product_efficient_attention")
def scaled_dot_product_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool, *_: Any, **__: Any
) -> Tensors:
    q, v = query.transpose(1, 2), value.transpose(1, 2)
    out, statistics = _efficient(q, v, compute_log_sumexp, query.shape[2])
    return out.transpose(1, 2), statistics, _seed(), _seed()


@kernel("_efficient_attention_forward")
def efficient_attention_forward(
    query: Any, key: Any, value: Any, bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None,
    max_seqlen_k: int | None, dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, **_: Any,
) -> Tensors:  # fmt: skip
    if cu_seqlens_q is None or max_seqlen_q is None:
        queries, keys = query.shape[1], key.shape[1]
        return *_efficient(query, value, compute_log_sumexp, queries), _seed(), _seed(), queries, keys
    out, statistics = _efficient(query, value, compute_log_sumexp, max_seqlen_q)
    statistics = floats(query, cu_seqlens_q.numel() - 1, query.shape[2], statistics.shape[-1])
    return out, statistics, _seed(), _seed(), max_seqlen_q, max_seqlen_k or 0


def backward_tile(dtype: torch.dtype, width: int, capability: tuple[int, int], dropout: bool) -> tuple[int, int, bool]:
    """Return the queries and keys of a block, and whether gradients of keys and values are accumulated in global memory."""
    half, modern = dtype in _HALF, capability >= (8, 0)
    major, minor = capability
    roomy = attention_data()["shared_memory_kib"].get(f"{major}.{minor}", 99) >= 163 and (modern or half)
    if width <= 64:
        return 64, 64, False
    if width <= 96 and half and capability in ((8, 6), (8, 9)) and not dropout:
        return 128, 64, False
    if width <= 128:
        return (128, 128 if half and modern else 64, False) if roomy else (64, 64, half)
    return (128, 64, half) if roomy else (64, 64, half)


def efficient_workspace_bytes(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], widths: tuple[int, int], capability: tuple[int, int],
    dropout: bool, splits_asked: int | None = None,
) -> int:  # fmt: skip
    """Return the backward workspace. `sizes`: batch, heads, queries, keys; `widths`: head sizes of keys and values."""
    batch, heads, queries, keys = sizes
    block_q, block_k, accumulates = backward_tile(dtype, max(widths), capability, dropout)
    splits = ceil(keys / block_k)
    if splits_asked is not None:
        splits = min(splits, splits_asked)
    else:
        splits = 1 if batch * heads >= 256 and keys <= 2 * block_k else splits
        splits = min(splits, 200 // (batch * heads)) if accumulates else splits
    splits = 1 if torch.are_deterministic_algorithms_enabled() else max(splits, 1)
    for_keys = sum(splits * block_k * round_up(width, block_q) for width in widths) if accumulates else 0
    tile = 4 + block_q * block_k  # a lock of 16 bytes before each tile
    for_queries = ceil(queries / block_q) * ceil(widths[0] / block_k) * tile if capability >= (7, 0) else 0
    return batch * heads * round_up(for_keys + for_queries, 4) * 4


@kernel("_efficient_attention_backward")
def efficient_attention_backward(
    grad_out_: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, logsumexp: Any, dropout_p: float, philox_seed: Any, philox_offset: Any,
    custom_mask_type: int, bias_requires_grad: bool, *, scale: float | None = None, num_splits_key: int | None = None,
    window_size: int | None = None, shared_storage_dqdkdv: bool = False,
) -> Tensors:  # fmt: skip
    grad = grad_out_.contiguous()
    if shared_storage_dqdkdv:
        chunk = query.new_empty(query.shape[0], query.shape[1], 3, *query.shape[2:])
        dq, dk, dv = chunk.unbind(2)
    else:
        dq, dk, dv = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    dbias = None
    if bias_requires_grad:
        dbias = bias.new_empty(*bias.shape[:-1], round_up(bias.shape[-1], 16))[..., : bias.shape[-1]]
    if query.dtype in _HALF:
        delta = floats(query, query.shape[0], query.shape[2], query.shape[1])
    else:
        product = grad.to(torch.float32) * out.to(torch.float32)
        total = floats(query, *query.shape[:3])
        delta = total.transpose(-2, -1).contiguous()
        del total, product
    ragged = cu_seqlens_q is not None
    lengths = (max_seqlen_q, max_seqlen_k) if ragged else (query.shape[1], key.shape[1])
    sizes = (cu_seqlens_q.numel() - 1 if ragged else query.shape[0], query.shape[2], *lengths)
    widths, capability = (query.shape[-1], value.shape[-1]), _device().gpu.compute_capability
    size = efficient_workspace_bytes(query.dtype, sizes, widths, capability, dropout_p > 0, num_splits_key)
    workspace = scratch(size, query)
    del delta, workspace, grad
    return dq, dk, dv, dbias


@kernel("_scaled_dot_product_efficient_attention_backward")
def scaled_dot_product_efficient_attention_backward(
    grad_out_: Any, query: Any, key: Any, value: Any, attn_bias: Any, out: Any, logsumexp: Any, philox_seed: Any,
    philox_offset: Any, dropout_p: float, grad_input_mask: list[bool], *_: Any, **__: Any,
) -> Tensors:  # fmt: skip
    if grad_out_ is None:
        return None, None, None, None
    grad, q, k, v, o = (t.transpose(1, 2) for t in (grad_out_, query, key, value, out))
    dq, dk, dv, dbias = efficient_attention_backward(
        grad, q, k, v, attn_bias, o, None, None, 0, 0, logsumexp, dropout_p, None, None, 0, grad_input_mask[3]
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dbias


def _like_layout(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Allocate an output whose dimensions are ordered in memory like the query's."""
    strides = strides_of(shape, sorted(range(len(shape)), key=query.stride))
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


@kernel("_scaled_dot_product_cudnn_attention")
def scaled_dot_product_cudnn_attention(
    query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool, *_: Any, **__: Any
) -> Tensors:
    _device().use("cudnn")
    batch, heads, queries, _ = query.shape
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    out = _like_layout(query, (batch, heads, queries, value.shape[3]))
    statistics = floats(query, batch, heads, queries, 1) if compute_log_sumexp else None
    scratch(cudnn_forward_bytes(batch * heads, queries, key.shape[2], value.shape[3], _device().gpu.sm_count), query)
    return out, statistics, None, None, queries, key.shape[2], seed, offset, None


@kernel("_cudnn_attention_forward")
def cudnn_attention_forward(
    query: Any, key: Any, value: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    compute_log_sumexp: bool, *_: Any, **__: Any,
) -> Tensors:  # fmt: skip
    return scaled_dot_product_cudnn_attention(query, key, value, attn_bias, compute_log_sumexp)


@kernel("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
def cudnn_attention_backward(grad_out: Any, query: Any, key: Any, value: Any, out: Any, *_: Any, **__: Any) -> Tensors:
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    turned = _like_layout(out, tuple(grad_out.shape)) if grad_out.stride(-1) != 1 else None
    # The query's gradient in float32 and the softmax sums; shared keys and values get a gradient per head.
    batch, heads, queries, width = query.shape
    size = batch * heads * queries * (width + 1) * 4 + cudnn_backward_bytes()
    shared = (each for each in (key, value) if each.shape[1] != heads)
    scratch(size + sum(batch * heads * each.shape[2:].numel() * each.element_size() for each in shared), query)
    del turned
    return dq, dk, dv


# The inference fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer: host code of several operators. Nested
# tensors, into which PyTorch packs a padded batch on that path, are not modelled: the batch stays padded.


@kernel("_native_multi_head_attention")
def native_multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Tensors:  # fmt: skip
    """Use fused attention if supported and no weights are needed, else a masked softmax."""
    if query is key is value and embed_dim // num_head % 8 == 0 and not need_weights and mask is None:
        heads = query.view(query.shape[0], -1, num_head, embed_dim // num_head).transpose(1, 2)
        if choose_attention(heads, heads, heads, None, 0.0, False, None, False) != MATH:
            return _fused(query, num_head, (qkv_weight, qkv_bias), (proj_weight, proj_bias)), None
    # Queries, keys and values of all heads in one tensor; the projection before it is freed.
    if query is key is value:
        projected = torch.matmul(query, qkv_weight.t())
    elif key is value:
        own, theirs = qkv_weight.split([query.shape[-1], 2 * query.shape[-1]])
        projected = torch.cat([torch.matmul(query, own.t()), torch.matmul(key, theirs.t())], 2)
    else:
        parts = zip((query, key, value), qkv_weight.chunk(3), strict=True)
        projected = torch.cat([torch.matmul(each, own.t()) for each, own in parts], 2)
    packed = _by_head(projected, num_head)
    del projected
    scores = torch.bmm(packed[0].flatten(0, 1), packed[1].flatten(0, 1).transpose(1, 2))
    scores = scores.view(*packed.shape[1:4], packed.shape[3])
    masked = torch.ops.aten._masked_softmax
    weights = torch.softmax(scores, -1) if mask is None else masked(scores, mask, 3, mask_type)
    del scores
    context = packed[0]  # its storage is reused
    del packed
    weights = weights if need_weights else None
    rows = context.permute(0, 2, 1, 3).contiguous().view(-1, embed_dim)
    out = torch.addmm(proj_bias, rows, proj_weight.t()).view(query.shape)
    del context, rows
    if weights is not None and average_attn_weights:
        weights = weights.sum(1).div_(num_head)
    return out, weights


def _fused(query: Any, heads: int, into: Tensors, out_of: Tensors) -> Tensor:
    packed = F.linear(query, *into)
    width = query.shape[-1] // heads
    q, k, v = (part.view(query.shape[0], -1, heads, width).transpose(1, 2) for part in packed.chunk(3, -1))
    context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(query.shape)
    return F.linear(context, *out_of)


def _by_head(qkv: Any, heads: int) -> Tensor:
    batch, length, width = qkv.shape
    packed: Tensor = qkv.new_empty(3, batch, heads, length, width // 3 // heads)
    return packed


@kernel("_transform_bias_rescale_qkv")
def transform_bias_rescale_qkv(qkv: Any, qkv_bias: Any, num_heads: int) -> Tensors:
    return tuple(_by_head(qkv, num_heads).unbind(0))


@kernel("_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None,
    mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    first, second = (norm_weight_1, norm_bias_1, eps), (norm_weight_2, norm_bias_2, eps)
    x = F.layer_norm(src, (embed_dim,), *first) if norm_first else src
    x, _ = native_multi_head_attention(
        x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
    )  # fmt: skip
    x.add_(src)
    residual = x if norm_first else F.layer_norm(x, (embed_dim,), *first)
    x = F.layer_norm(x, (embed_dim,), *second) if norm_first else residual
    hidden = torch._addmm_activation(ffn_bias_1, x.reshape(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(src.shape)
    del hidden
    x.add_(residual)
    del residual
    return x if norm_first else F.layer_norm(x, (embed_dim,), *second)


@kernel("_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(t: Any, mask: Any) -> bool:
    active().stand_ins.assume("_nested_tensor_from_mask", "a padded batch stays padded instead of being packed")
    return False

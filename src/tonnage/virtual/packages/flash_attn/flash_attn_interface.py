"""Attention functions for batches and variable-length sequences, packed or not, and with a KV cache.

They allocate what flash-attn's C++ does, in its order. Tensors are batched, or packed by token with cumulative lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tonnage.virtual.kernels.attention import backward_accumulators, floats, round_up, split_accumulators

WIDEST_HEAD = 256
_UNLIMITED = (-1, -1)


def maybe_contiguous(x: Any) -> Any:
    """Return the tensor with a contiguous last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _processors(like: Tensor) -> int:
    return torch.cuda.get_device_properties(like.device).multi_processor_count


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise the errors that flash-attn would."""
    if not q.is_cuda:
        raise RuntimeError(f"flash-attn needs tensors on a GPU, and the queries are on {q.device}.")
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        raise RuntimeError(
            f"flash-attn takes queries, keys and values that are all float16 or all bfloat16, not {kinds}."
        )
    if q.shape[-1] > WIDEST_HEAD:
        raise RuntimeError(f"flash-attn takes heads of up to {WIDEST_HEAD} elements, and these have {q.shape[-1]}.")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError(f"The {q.shape[-2]} heads of queries cannot share {k.shape[-2]} heads of keys evenly.")
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise RuntimeError("flash-attn needs an Ampere card or a newer one (compute capability 8.0).")


def _heads_become_length(
    queries: int, q: Tensor, k: Tensor, dropout: float, window: tuple[int, int], slopes: Any
) -> bool:
    """Whether heads that share keys are computed as queries, which is faster for a single query, causal or not."""
    return queries == 1 and q.shape[-2] > k.shape[-2] and max(window) < 0 and not dropout and slopes is None


def _outputs(
    q: Tensor, statistics: tuple[int, ...], sequences: int, queries: int, keys: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the output, logsumexp, the probabilities (only to test dropout), and the generator's state."""
    kept = (sequences, q.shape[-2], round_up(queries), round_up(keys)) if keep else (0,)
    out, sums, probabilities = torch.empty_like(q), floats(q, *statistics), q.new_empty(kept)
    return out, sums, probabilities, torch.empty(2, dtype=torch.int64, device=q.device)


# Operators, with flash-attn's names and arguments


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda")
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = map(maybe_contiguous, (q, k, v))
    batch, queries, heads, width = q.shape
    swapped = _heads_become_length(queries, q, k, dropout_p, (window_size_left, window_size_right), alibi_slopes)
    made = _outputs(q, (batch, heads, queries), batch, queries, k.shape[1], return_softmax)
    if not dropout_p:
        sizes = (batch, k.shape[2], heads // k.shape[2], k.shape[1]) if swapped else (batch, heads, queries, k.shape[1])
        split_accumulators(q, sizes, width, _processors(q))
    return made


@_flash_attn_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return _outputs(q, (batch, heads, queries), batch, queries, k.shape[1], options[-1])


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), device_types="cuda")
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = map(maybe_contiguous, (q, k, v))
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_k.dtype != torch.int32:
        raise RuntimeError(
            f"flash-attn takes the ends of sequences as int32, not {cu_seqlens_q.dtype} and {cu_seqlens_k.dtype}."
        )
    batch, shared = cu_seqlens_q.numel() - 1, k.shape[-2]
    swapped = _heads_become_length(max_seqlen_q, q, k, dropout_p, (window_size_left, window_size_right), alibi_slopes)
    turned = torch.empty_like(q) if swapped else None
    made = _outputs(q, (q.shape[1], q.shape[0]), batch, max_seqlen_q, max_seqlen_k, return_softmax)
    if swapped:
        sizes = (batch, shared, q.shape[-2] // shared, max_seqlen_k)
        parts = split_accumulators(q, sizes, q.shape[-1], _processors(q))
        out = torch.empty_like(made[0])  # transposed back, as are the queries
        again = torch.empty_like(q)
        del parts, turned, again
        return out, *made[1:]
    return made


@_flash_attn_varlen_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *options: Any, return_softmax: bool = False, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    keep = options[7] if len(options) > 7 else return_softmax
    return _outputs(q, (q.shape[1], q.shape[0]), cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k, keep)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda")
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _backward((dout, q, k, v, out), (dq, dk, dv), None, deterministic)


@_flash_attn_backward.register_fake
def _(dout: Tensor, q: Tensor, *_: Any, **__: Any) -> Tensor:
    return floats(q, q.shape[0], q.shape[2], round_up(q.shape[1]))


@torch.library.custom_op(
    "flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda"
)
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    return _backward((dout, q, k, v, out), (dq, dk, dv), cu_seqlens_q.numel() - 1, deterministic)


@_flash_attn_varlen_backward.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any, **_: Any) -> Tensor:
    return floats(q, q.shape[1], q.shape[0] + 128 * (rest[7].numel() - 1))


def _backward(
    given: Sequence[Tensor], gradients: Sequence[Tensor | None], sequences: int | None, deterministic: bool
) -> Tensor:
    """Allocate the accumulators of a backward pass and return the softmax sums. `sequences` is None for a batch."""
    tensors = [maybe_contiguous(t) for t in given]  # all of them stay alive to the end
    _, q, k, v, _ = tensors
    made = [torch.empty_like(t) if g is None else g for t, g in zip((q, k, v), gradients, strict=True)]
    sums, dq_sum = backward_accumulators(q, sequences, deterministic, _processors(q))
    if k.shape[-2] != q.shape[-2]:  # a gradient for every query head, summed over those that share keys
        expanded = [t.new_empty(*k.shape[:-2], q.shape[-2], k.shape[-1]) for t in (k, v)]
        for gradient, each in zip(made[1:], expanded, strict=True):
            torch.sum(each.unflatten(-2, (k.shape[-2], -1)), dim=-2, out=gradient)
    del dq_sum
    return sums


# Autograd


@dataclass(frozen=True)
class _Call:
    """The options of one call; `lengths` are the cumulative and maximum lengths of queries and keys (varlen only)."""

    packed: int
    lengths: tuple[Tensor, Tensor, int, int] | None
    block_table: Tensor | None
    differentiate: bool
    dropout: float
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    slopes: Tensor | None
    deterministic: bool
    keep: bool


class _Attention(torch.autograd.Function):
    """Attention of queries, keys and values, of which the last two (`packed` 2) or all (3) may be one tensor."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> Any:
        q, k, v = (*inputs[:-1], *inputs[-1].detach().unbind(-3)) if call.packed else inputs
        _check(q, k, v)
        width = q.shape[-1]
        scale = width**-0.5 if call.scale is None else call.scale
        if width % 8:
            q, k, v = (pad(t, [0, 8 - width % 8]) for t in (q, k, v))
        options = (call.dropout, scale, call.causal, *call.window, call.softcap, call.slopes)
        keep = call.keep and call.dropout > 0
        if call.lengths is None:
            out, sums, kept, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *options, keep)
        else:
            varlen = torch.ops.flash_attn._flash_attn_varlen_forward
            out, sums, kept, state = varlen(q, k, v, *call.lengths, *options, keep, call.block_table)
        if call.differentiate and any(t.requires_grad for t in inputs):
            ctx.save_for_backward(q, k, v, out, sums, state, *(call.lengths or ())[:2])
            ctx.call, ctx.options = call, options
        shown = out[..., :width]
        return (shown, sums, kept) if call.keep else shown

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        q, k, v, out, sums, state, *ends = ctx.saved_tensors
        call, width = ctx.call, grad.shape[-1]
        packed, gradients = _empty_gradients(call.packed, q, k, v)
        if width % 8:
            grad = pad(grad, [0, 8 - width % 8])
        arguments = (grad, q, k, v, out, sums, *gradients)
        if call.lengths is None:
            torch.ops.flash_attn._flash_attn_backward(*arguments, *ctx.options, call.deterministic, state)
        else:
            arguments += (*ends, *call.lengths[2:])
            torch.ops.flash_attn._flash_attn_varlen_backward(*arguments, *ctx.options, call.deterministic, state)
        return None, *(t[..., :width] for t in packed)


def _empty_gradients(packed: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Allocate gradients of the inputs, and return them with those of queries, keys and values, which may be views."""
    if not packed:
        each = [torch.empty_like(t) for t in (q, k, v)]
        return each, tuple(each)
    alone = [torch.empty_like(q)] if packed == 2 else []
    together = k.new_empty(*k.shape[:-2], packed, *k.shape[-2:])
    return [*alone, together], (*alone, *together.unbind(-3))


# Public functions


def _attend(packed: int, inputs: tuple[Tensor, ...], lengths: Any, options: Any, block_table: Any = None) -> Any:
    if lengths is not None:
        lengths = (*lengths[:2], int(lengths[2]), int(lengths[3]))
    return _Attention.apply(_Call(packed, lengths, block_table, torch.is_grad_enabled(), *options), *inputs)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of tensors of shape (batch, length, heads, width)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(0, (q, k, v), None, options)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention with keys and values in one tensor: (batch, length, 2, heads, width)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(2, (q, kv), None, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention with all in one tensor: (batch, length, 3, heads, width)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(3, (qkv,), None, options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Variable-length attention of shape (tokens, heads, width); keys may be paged."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(0, (q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options, block_table)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Variable-length attention with keys and values in one tensor: (tokens, 2, heads, width)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(2, (q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = _UNLIMITED, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Variable-length attention with all in one tensor: (tokens, 3, heads, width)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(3, (qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), options)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention to a KV cache, into which new keys and values are written; for inference only."""
    _check(q, k_cache, v_cache)
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    batch, queries, heads, width = q.shape
    keys = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    padding = [0, -width % 8]
    with torch.no_grad():
        padded = [pad(t, padding) for t in (q, k_cache, v_cache)] if width % 8 else [q]
        out = torch.empty_like(padded[0])
        sums = floats(q, batch, heads, queries)
        fresh = [pad(t, padding) for t in (k, v) if t is not None] if width % 8 else []
        sizes = (batch, heads, queries, keys)
        if _heads_become_length(queries, q, k_cache, 0.0, window_size, alibi_slopes):
            sizes = (batch, k_cache.shape[2], heads // k_cache.shape[2], keys)
        parts = split_accumulators(q, sizes, round_up(width, 8), _processors(q), num_splits)
    del padded, fresh, parts
    shown = out[..., :width]
    return (shown, sums) if return_softmax_lse else shown

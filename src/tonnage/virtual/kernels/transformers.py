"""The inference fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer: host code of several operators.

Nested tensors, into which PyTorch packs a padded batch on that path, are not modelled: the batch stays padded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.virtual.kernels.attention_choice import MATH, choose_attention
from tonnage.virtual.kernels.registry import kernel
from tonnage.virtual.session import active

Tensors = tuple[Any, ...]


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
    if not need_weights:
        weights = None
    rows = context.permute(0, 2, 1, 3).contiguous().view(-1, embed_dim)
    out = torch.addmm(proj_bias, rows, proj_weight.t()).view(query.shape)
    del context, rows
    if weights is not None and average_attn_weights:
        weights = weights.sum(1)
        weights /= num_head
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
    if not norm_first:
        x = F.layer_norm(x, (embed_dim,), *first)
    residual = x
    if norm_first:
        x = F.layer_norm(x, (embed_dim,), *second)
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

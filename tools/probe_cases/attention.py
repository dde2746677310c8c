"""Scaled-dot-product attention in each of its backends, and the modules built on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .spec import BF16, F16, F32, FLOATS, HALVES, Case, Made, T, apply, case, mask, module, t, without_grad

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
MATH, CUDNN = SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
SHAPES = ((2, 4, 64, 64), (1, 12, 1024, 64), (8, 12, 512, 64), (2, 8, 127, 64), (4, 32, 2048, 128), (1, 1, 1, 64), (3, 5, 77, 40), (2, 16, 197, 64))


def cases() -> Iterator[Case]:
    for backend in (FLASH, EFFICIENT, CUDNN, MATH):
        yield from plain(backend)
    yield from default_choice()
    yield from masked()
    yield from modules()
    yield from ragged()


def only(backend: SDPBackend) -> Any:
    return lambda: sdpa_kernel(backend)


def qkv(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "", kv: tuple[int, ...] | None = None, grad: bool = True) -> list[T]:
    return [t(*s, dtype=dtype, layout=layout, grad=grad) for s in (shape, kv or shape, kv or shape)]


def plain(backend: SDPBackend) -> Iterator[Case]:
    def attention(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "", kv: tuple[int, ...] | None = None, grad: bool = True, **options: Any) -> Case:
        note = " ".join([backend.name, layout, "" if grad else "no grad"]).strip()
        return case("sdpa", F.scaled_dot_product_attention, *qkv(shape, dtype, layout, kv, grad), around=only(backend), note=note, **options)

    dtypes = HALVES if backend in (FLASH, CUDNN) else FLOATS
    for dtype in dtypes:
        for shape in SHAPES:
            for causal in (False, True):
                yield attention(shape, dtype, is_causal=causal)
            yield attention(shape, dtype, layout="heads_inside", is_causal=True)
            yield attention(shape, dtype, dropout_p=0.1)
            yield attention(shape, dtype, is_causal=True, grad=False)
        for width in (8, 16, 32, 40, 72, 80, 96, 100, 112, 128, 160, 192, 224, 256):
            yield attention((2, 4, 130, width), dtype, is_causal=True)
            yield attention((2, 4, 128, width), dtype, layout="heads_inside")
        for q_length, kv_length in ((1, 128), (1, 1000), (64, 200), (200, 64), (128, 129), (1, 4096)):
            yield attention((2, 8, q_length, 64), dtype, kv=(2, 8, kv_length, 64))
            yield attention((2, 8, q_length, 128), dtype, kv=(2, 8, kv_length, 128), grad=False)
        for heads, kv_heads in ((8, 2), (32, 8), (8, 1)):
            yield attention((2, heads, 256, 64), dtype, kv=(2, kv_heads, 256, 64), enable_gqa=True, is_causal=True)
            yield attention((2, heads, 100, 128), dtype, kv=(2, kv_heads, 100, 128), enable_gqa=True, is_causal=True, layout="heads_inside")
            yield attention((2, heads, 1, 128), dtype, kv=(2, kv_heads, 777, 128), enable_gqa=True, grad=False)
        yield attention((2, 8, 100, 64), dtype, scale=0.3)


def default_choice() -> Iterator[Case]:
    """What the dispatcher chooses by itself."""
    for dtype in FLOATS:
        for shape in (*SHAPES, (16, 16, 1024, 80), (2, 8, 300, 256), (2, 8, 64, 512), (2, 8, 300, 65)):
            for layout in ("", "heads_inside"):
                for causal in (False, True):
                    yield case("sdpa", F.scaled_dot_product_attention, *qkv(shape, dtype, layout), is_causal=causal, note=f"default {layout}")
            yield case("sdpa", F.scaled_dot_product_attention, *qkv(shape, dtype), dropout_p=0.1, note="default")
            yield case("sdpa", F.scaled_dot_product_attention, *qkv(shape, dtype, grad=False), note="default no grad")
        three = [t(8, 100, 64, dtype=dtype)] * 3
        yield case("sdpa", F.scaled_dot_product_attention, *three, note="default 3-D")
        yield case("sdpa", F.scaled_dot_product_attention, t(2, 8, 64, 64, dtype=dtype), t(2, 8, 64, 64, dtype=dtype), t(2, 8, 64, 32, dtype=dtype),
                   note="default, values narrower")  # fmt: skip
        yield case("sdpa", F.scaled_dot_product_attention, *[t(2, 8, 100, 64, dtype=dtype, layout=la) for la in ("", "expanded_heads", "expanded_heads")],
                   note="default, keys expanded over heads")  # fmt: skip


def masked() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((2, 8, 128, 64), (2, 8, 100, 64), (4, 12, 197, 64), (1, 16, 1024, 128), (2, 4, 77, 80)):
            b, h, length, _ = shape
            for backend in (None, EFFICIENT, MATH, CUDNN):
                around = only(backend) if backend else _nothing
                word = backend.name if backend else "default"
                for m, name in ((mask(length, length), "bool 2-D"), (mask(b, 1, length, length), "bool per batch"), (mask(b, 1, 1, length), "bool keys"),
                                (mask(b, h, length, length, layout="expanded_heads"), "bool expanded"),
                                (mask(b, 1, length, length, layout="expanded"), "bool expanded over the batch"),
                                (t(length, length, dtype=dtype, grad=False), "bias 2-D"), (t(b, h, length, length, dtype=dtype, grad=False), "bias full"),
                                (t(b, 1, length, length, dtype=dtype, grad=False), "bias per batch"),
                                (t(1, h, length, length, dtype=dtype), "bias per head with grad"), (t(b, h, length, length, dtype=dtype), "bias full with grad"),
                                (t(b, h, length, length, dtype=dtype, layout="narrowed", grad=False), "bias in a wider buffer")):  # fmt: skip
                    yield case("sdpa", F.scaled_dot_product_attention, *qkv(shape, dtype), attn_mask=m, around=around, note=f"{word} mask {name}")
        yield case("sdpa", F.scaled_dot_product_attention, *qkv((2, 8, 100, 64), dtype), attn_mask=t(2, 1, 100, 100, grad=False), note="fp32 bias")
        yield case("sdpa", F.scaled_dot_product_attention, *qkv((2, 8, 100, 64), dtype), attn_mask=mask(100, 100), dropout_p=0.1, note="mask and dropout")
        yield case("sdpa", F.scaled_dot_product_attention, *qkv((2, 8, 100, 64), dtype, kv=(2, 2, 100, 64)), attn_mask=mask(2, 1, 100, 100), enable_gqa=True,
                   note="mask and GQA")  # fmt: skip
        yield case("sdpa", F.scaled_dot_product_attention, *qkv((2, 8, 1, 64), dtype, kv=(2, 8, 333, 64), grad=False), attn_mask=mask(2, 1, 1, 333),
                   note="decode with mask")  # fmt: skip


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def modules() -> Iterator[Case]:
    def call(m: nn.MultiheadAttention, x: torch.Tensor, **options: Any) -> Any:
        return m(x, x, x, **options)

    for dtype in (F32, BF16, F16):
        for dropout in (0.0, 0.1):
            for batch_first in (False, True):
                m = module(lambda d=dropout, b=batch_first: nn.MultiheadAttention(256, 8, dropout=d, batch_first=b), dtype)
                for weights in (True, False):
                    note = f"batch_first={batch_first} dropout={dropout}"
                    yield case("MultiheadAttention", call, m, t(33, 20, 256, dtype=dtype), need_weights=weights, note=note)
                    batch, length = (33, 20) if batch_first else (20, 33)
                    yield case("MultiheadAttention", call, m, t(33, 20, 256, dtype=dtype), need_weights=weights, note=f"{note} padding",
                               key_padding_mask=mask(batch, length))  # fmt: skip
                    yield case("MultiheadAttention", call, m, t(33, 20, 256, dtype=dtype), need_weights=weights, note=f"{note} mask",
                               attn_mask=mask(length, length, fill="bool:0.1"))  # fmt: skip
        cross = module(lambda: nn.MultiheadAttention(256, 8, kdim=128, vdim=96, batch_first=True), dtype)
        yield case("MultiheadAttention", lambda m, q, k, v: m(q, k, v, need_weights=False), cross, t(4, 20, 256, dtype=dtype), t(4, 30, 128, dtype=dtype),
                   t(4, 30, 96, dtype=dtype), note="cross")  # fmt: skip
        for norm_first in (False, True):
            for activation in ("relu", "gelu"):
                for train in (True, False):
                    layer = module(lambda n=norm_first, a=activation: nn.TransformerEncoderLayer(128, 4, 512, activation=a, batch_first=True, norm_first=n),
                                   dtype, train)  # fmt: skip
                    around = {} if train else {"around": without_grad}
                    yield case("TransformerEncoderLayer", apply, layer, t(4, 50, 128, dtype=dtype), note=f"train={train}", **around)
                    yield case("TransformerEncoderLayer", apply, layer, t(4, 50, 128, dtype=dtype), src_key_padding_mask=mask(4, 50), note=f"train={train}", **around)
        decoder = module(lambda: nn.TransformerDecoderLayer(128, 4, 512, batch_first=True), dtype)
        yield case("TransformerDecoderLayer", apply, decoder, t(4, 50, 128, dtype=dtype), t(4, 30, 128, dtype=dtype))
        causal = Made(lambda d: nn.Transformer.generate_square_subsequent_mask(50, device=d))
        yield case("TransformerDecoderLayer", apply, decoder, t(4, 50, 128, dtype=dtype), t(4, 30, 128, dtype=dtype), tgt_mask=causal, tgt_is_causal=True)
        encoder = module(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2), dtype, train=False)
        yield case("TransformerEncoder", apply, encoder, t(4, 50, 128, dtype=dtype), src_key_padding_mask=Made(_padding), around=without_grad, note="nested fast path")


def _padding(device: str) -> torch.Tensor:
    return torch.arange(50, device=device)[None] >= torch.tensor([50, 40, 30, 20], device=device)[:, None]


def ragged() -> Iterator[Case]:
    def flash_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> Any:
        return torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, 100, 100, 0.0, True, False)[:2]

    for dtype in HALVES:
        ends = Made(lambda d: torch.tensor([0, 50, 150, 200], dtype=torch.int32, device=d))
        yield case("_flash_attention_forward", flash_varlen, *qkv((200, 8, 64), dtype), ends, note="varlen")

        def nested(device: str, dtype: torch.dtype = dtype) -> torch.Tensor:
            parts = [torch.randn(n, 8, 64, device=device, dtype=dtype) for n in (50, 100, 50)]
            return torch.nested.nested_tensor(parts, layout=torch.jagged)

        yield case("sdpa nested", lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2).values(),
                   Made(nested), backward=False, note="jagged")  # fmt: skip

"""Calls over a grid of shapes whose times a clock is made from: drawn at random, the same ones every time.

Each kind draws from its own generator, so that a kind with more cases changes no other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from probe_cases.spec import BF16, F16, F32, Case, Made, case, ints, t, without_grad
from torch import Tensor

WIDTHS = (64, 80, 96, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 2816, 3072,
          3584, 3840, 4096, 4608, 4864, 5120, 6144, 6912, 7168, 8192, 8960, 9216, 11008, 12288, 13824, 14336, 16384, 18944, 28672)  # fmt: skip
VOCABULARIES = (30522, 32000, 50257, 50304, 51200, 128256, 151936, 256000)
MOST_BYTES = 6 << 30
MOST_OPERATIONS = {BF16: 6e12, F16: 6e12, F32: 4e11, torch.float8_e4m3fn: 1e13, "tf32": 3e12}
HALVES = (BF16, BF16, BF16, F16)


def log_uniform(draw: random.Random, low: float, high: float, multiple: int = 1) -> int:
    """A whole number between two, as likely small as large."""
    return max(multiple, round(math.exp(draw.uniform(math.log(low), math.log(high))) / multiple) * multiple)


def cases() -> Iterator[tuple[str, Case]]:
    """All of them, with the kind that each belongs to."""
    for kind in KINDS:
        yield from ((kind.__name__, found) for found in kind(random.Random(kind.__name__)))


# Matrix products ------------------------------------------------------------------------------------------------------


def matmul(draw: random.Random) -> Iterator[Case]:
    """As a linear layer runs: forward, the gradient of its input, and of its weight."""
    types: Sequence[Any] = (BF16,) * 12 + (F16,) * 3 + (F32,) * 2 + ("tf32",) * 3
    for _ in range(1800):
        kind = draw.choice(types)
        dtype = F32 if kind == "tf32" else kind
        rows = log_uniform(draw, 1, 131072, draw.choice((1, 8, 64, 256)))
        n = draw.choice(VOCABULARIES if draw.random() < 0.06 else WIDTHS)
        k = draw.choice(WIDTHS)
        if 2.0 * rows * n * k > MOST_OPERATIONS[kind] or (rows * (n + k) + n * k) * dtype.itemsize > MOST_BYTES:
            continue
        layout = draw.choice(("tn", "nn", "nt"))
        around = _tf32 if kind == "tf32" else without_grad
        yield case("mm", _product, *_factors(rows, n, k, dtype, layout), note=f"{layout} {kind}", around=around)
        if layout == "tn" and draw.random() < 0.3:
            bias = t(n, dtype=dtype)
            yield case("addmm", torch.addmm, bias, *_factors(rows, n, k, dtype, layout), note=f"{kind}", around=around)


def _factors(rows: int, n: int, k: int, dtype: torch.dtype, layout: str) -> tuple[Any, Any]:
    if layout == "tn":
        return t(rows, k, dtype=dtype), t(k, n, dtype=dtype, layout="transposed")
    if layout == "nn":
        return t(rows, n, dtype=dtype), t(n, k, dtype=dtype)
    return t(n, rows, dtype=dtype, layout="transposed"), t(rows, k, dtype=dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


class _tf32:
    def __enter__(self) -> None:
        self.grad = torch.no_grad()
        self.grad.__enter__()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def __exit__(self, *exception: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self.grad.__exit__(None, None, None)


def matmul8(draw: random.Random) -> Iterator[Case]:
    """FP8 factors with a scale for each tensor."""
    narrow = torch.float8_e4m3fn
    for _ in range(200):
        rows, n, k = log_uniform(draw, 16, 65536, 16), draw.choice(WIDTHS), draw.choice(WIDTHS)
        if 2.0 * rows * n * k <= MOST_OPERATIONS[narrow] and not (n % 16 or k % 16):
            left, right = t(rows, k, dtype=narrow, grad=False), t(k, n, dtype=narrow, layout="transposed", grad=False)
            scale = t(fill="full:1", grad=False)
            yield case("_scaled_mm", torch._scaled_mm, left, right, scale, scale, out_dtype=BF16, around=without_grad)


def batched(draw: random.Random) -> Iterator[Case]:
    for _ in range(400):
        dtype = draw.choice((*HALVES, F32))
        count = log_uniform(draw, 2, 1024)
        m, n, k = (log_uniform(draw, 16, 2048, draw.choice((1, 8, 16))) for _ in range(3))
        if 2.0 * count * m * n * k <= MOST_OPERATIONS[dtype] and count * (m * k + n * k + m * n) * 4 <= MOST_BYTES:
            right = t(count, k, n, dtype=dtype, layout=draw.choice(("", "transposed")))
            yield case("bmm", torch.bmm, t(count, m, k, dtype=dtype), right, around=without_grad)


def attention(draw: random.Random) -> Iterator[Case]:
    """By the backend that PyTorch chooses, forward and backward."""
    for _ in range(420):
        dtype = draw.choice((*HALVES, F32))
        width = draw.choice((32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 256))
        heads = draw.choice((1, 4, 8, 12, 16, 20, 24, 32, 40, 64))
        groups = draw.choice((1, 1, 1, 2, 4, 8))
        length = log_uniform(draw, 16, 32768, draw.choice((1, 8, 64, 128)))
        batch = log_uniform(draw, 1, 64)
        if heads % groups or batch * heads * length * length * width * 4 > (3e12 if dtype != F32 else 2e11):
            continue
        if batch * heads * length * width * 4 > MOST_BYTES // 8:
            continue
        query = t(batch, heads, length, width, dtype=dtype, layout="heads_inside")
        other = t(batch, heads // groups, length, width, dtype=dtype, layout="heads_inside")
        options: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
        how = draw.choice(("causal", "causal", "whole", "masked"))
        if how == "causal":
            options["is_causal"] = True
        elif how == "masked" and length <= 4096:
            options["attn_mask"] = t(batch, 1, length, length, dtype=dtype, grad=False)
        yield case("sdpa", F.scaled_dot_product_attention, query, other, other, note=how, **options)


# What moves bytes -----------------------------------------------------------------------------------------------------


def _rows_and_columns(draw: random.Random, most: float = 3e8) -> tuple[int, int]:
    columns = draw.choice(WIDTHS) if draw.random() < 0.8 else log_uniform(draw, 2, 65536)
    return log_uniform(draw, 1, max(2.0, most / columns)), columns


def elementwise(draw: random.Random) -> Iterator[Case]:
    calls: list[tuple[str, Callable[..., Any], int]] = [
        ("add", torch.add, 2), ("mul", torch.mul, 2), ("gelu", F.gelu, 1), ("silu", F.silu, 1), ("relu", F.relu, 1), ("exp", torch.exp, 1),
        ("tanh", torch.tanh, 1), ("sigmoid", torch.sigmoid, 1), ("pow", lambda x: x.pow(2), 1), ("rsqrt", lambda x: x.abs().rsqrt(), 1),
        ("dropout", lambda x: F.dropout(x, 0.1), 1), ("where", lambda x, y: torch.where(x > 0, x, y), 2), ("neg", torch.neg, 1),
        ("add_", lambda x, y: x.detach().add_(y.detach()), 2), ("div", lambda x: x / 3.0, 1), ("clone", torch.clone, 1),
        ("masked_fill", lambda x: x.masked_fill(x > 1, 0.0), 1),
    ]  # fmt: skip
    for _ in range(500):
        name, call, count = draw.choice(calls)
        dtype = draw.choice((*HALVES, F32, F32))
        shape = _rows_and_columns(draw)
        yield case(name, call, *(t(*shape, dtype=dtype) for _ in range(count)))


def conversions(draw: random.Random) -> Iterator[Case]:
    """Casts, broadcasts and copies between layouts."""
    for _ in range(300):
        rows, columns = _rows_and_columns(draw, 2e8)
        narrow = draw.choice(HALVES)
        what = draw.choice(("narrow", "widen", "mixed add", "bias", "column", "transposed", "heads", "cat", "strided"))
        one = t(rows, columns, dtype=narrow)
        if what == "narrow":
            yield case("to", lambda x, d=narrow: x.to(d), t(rows, columns), note=what)
        elif what == "widen":
            yield case("to", lambda x: x.float(), one, note=what)
        elif what == "mixed add":
            yield case("add", torch.add, one, t(rows, columns), note=what)
        elif what == "bias":
            yield case("add", torch.add, one, t(columns, dtype=narrow), note=what)
        elif what == "column":
            yield case("mul", torch.mul, one, t(rows, 1, dtype=narrow), note=what)
        elif what == "transposed":
            yield case("contiguous", lambda x: x.t().contiguous(), one, note=what)
        elif what == "heads" and columns % 64 == 0:
            yield case(
                "contiguous", lambda x: x.view(-1, x.shape[-1] // 64, 64).transpose(0, 1).contiguous(), one, note=what
            )
        elif what == "cat":
            yield case("cat", lambda x, y: torch.cat((x, y), -1), one, one, note=what)
        elif what == "strided":
            yield case("clone", lambda x: x[:, ::2].clone(), one, note=what)


def reductions(draw: random.Random) -> Iterator[Case]:
    calls: list[tuple[str, Callable[..., Any]]] = [
        ("sum last", lambda x: x.sum(-1)), ("sum first", lambda x: x.sum(0)), ("sum", torch.sum), ("mean last", lambda x: x.mean(-1)),
        ("amax last", lambda x: x.amax(-1)), ("argmax last", lambda x: x.argmax(-1)), ("norm", torch.linalg.vector_norm),
        ("var last", lambda x: x.var(-1)), ("cumsum", lambda x: x.cumsum(-1)),
    ]  # fmt: skip
    for _ in range(300):
        name, call = draw.choice(calls)
        yield case(name, call, t(*_rows_and_columns(draw, 2e8), dtype=draw.choice((*HALVES, F32))))


def norms(draw: random.Random) -> Iterator[Case]:
    for _ in range(260):
        dtype = draw.choice((*HALVES, F32))
        rows, columns = _rows_and_columns(draw, 2e8)
        weight = t(columns, dtype=dtype)
        what = draw.choice(("layer_norm", "rms_norm", "softmax", "log_softmax", "spelled rms"))
        one = t(rows, columns, dtype=dtype)
        if what == "layer_norm":
            yield case(what, lambda x, w, b: F.layer_norm(x, w.shape, w, b), one, weight, weight)
        elif what == "rms_norm":
            yield case(what, lambda x, w: F.rms_norm(x, w.shape, w), one, weight)
        elif what == "spelled rms":
            yield case(what, _spelled_rms, one, weight)
        else:
            yield case(what, partial(getattr(F, what), dim=-1), one)
    for _ in range(80):
        dtype = draw.choice((BF16, F16, F32, F32))
        batch, channels, side = log_uniform(draw, 1, 256), draw.choice(WIDTHS[:18]), log_uniform(draw, 4, 112)
        if batch * channels * side * side <= 2e8:
            one = t(batch, channels, side, side, dtype=dtype, layout=draw.choice(("", "channels_last")))
            weight, running = t(channels, dtype=dtype), t(channels, dtype=dtype, grad=False, fill="unit")
            if draw.random() < 0.6:
                yield case(
                    "batch_norm", lambda x, w, m, v: F.batch_norm(x, m, v, w, w, True), one, weight, running, running
                )
            elif channels % 32 == 0:
                yield case("group_norm", lambda x, w: F.group_norm(x, 32, w, w), one, weight)


def _spelled_rms(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers has it, operator by operator."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def losses(draw: random.Random) -> Iterator[Case]:
    for _ in range(90):
        classes = draw.choice((10, 1000, *VOCABULARIES))
        rows = log_uniform(draw, 8, max(16.0, 1e9 / classes))
        yield case(
            "cross_entropy", F.cross_entropy, t(rows, classes, dtype=draw.choice((F32, BF16))), ints(classes, rows)
        )
    for _ in range(60):
        rows, columns = _rows_and_columns(draw, 1e8)
        yield case("mse_loss", F.mse_loss, t(rows, columns), t(rows, columns, grad=False))


def indexing(draw: random.Random) -> Iterator[Case]:
    for _ in range(160):
        dtype = draw.choice((BF16, F32))
        entries, width, rows = (
            draw.choice((512, 2048, *VOCABULARIES)),
            draw.choice(WIDTHS[:27]),
            log_uniform(draw, 16, 65536),
        )
        what = draw.choice(
            ("embedding", "embedding", "index_select", "gather", "scatter_add", "index_add", "topk", "sort")
        )
        table = t(entries, width, dtype=dtype)
        if rows * width > 2e8 or entries * width > 1e9:
            continue
        if what == "embedding":
            yield case(what, lambda i, w: F.embedding(i, w), ints(entries, rows), table)
        elif what == "index_select":
            yield case(what, lambda w, i: w.index_select(0, i), table, ints(entries, rows))
        elif what == "gather":
            yield case(what, lambda x, i: x.gather(-1, i), t(rows, width, dtype=dtype), ints(width, rows, 1))
        elif what == "scatter_add":
            yield case(
                what,
                lambda x, i: torch.zeros_like(x).scatter_add(-1, i, x),
                t(rows, width, dtype=dtype),
                ints(width, rows, width),
            )
        elif what == "index_add":
            yield case(
                what, lambda w, i, x: w.index_add(0, i, x), table, ints(entries, rows), t(rows, width, dtype=dtype)
            )
        elif what == "topk":
            yield case(what, lambda x: x.topk(8, -1), t(rows, width, dtype=dtype))
        elif rows * width <= 2e7:
            yield case(what, lambda x: x.sort(-1), t(rows, width, dtype=dtype))


def creation(draw: random.Random) -> Iterator[Case]:
    calls: list[tuple[str, Callable[..., Any]]] = [
        ("zero_", lambda x: x.zero_()), ("fill_", lambda x: x.fill_(1.0)), ("normal_", lambda x: x.normal_()), ("uniform_", lambda x: x.uniform_()),
        ("copy_", lambda x: x.copy_(x.flip(0))),
    ]  # fmt: skip
    for _ in range(80):
        name, call = draw.choice(calls)
        shape = (log_uniform(draw, 1, 3e8),)
        yield case(name, call, t(*shape, dtype=draw.choice((BF16, F32)), grad=False), around=without_grad)


# Whole layers and steps -----------------------------------------------------------------------------------------------


def convolutions(draw: random.Random) -> Iterator[Case]:
    for _ in range(420):
        kind = draw.choice((F32, "tf32", "tf32", BF16, BF16, F16))
        dtype = F32 if kind == "tf32" else kind
        batch, side = log_uniform(draw, 1, 256), log_uniform(draw, 4, 256)
        into, out = (draw.choice((3, 16, 32, 64, 96, 128, 192, 256, 320, 512, 640, 1024, 2048)) for _ in range(2))
        size, stride = draw.choice(((1, 1), (1, 1), (3, 1), (3, 1), (3, 2), (5, 1), (7, 2), (16, 16)))
        groups = 1
        if draw.random() < 0.15 and into > 3:
            out = groups = into
        if side < size or batch * side * side * (into + out / stride**2) * 4 > MOST_BYTES / 2:
            continue
        if 2.0 * batch * (side / stride) ** 2 * into * out * size * size / groups > 1.5e12:
            continue
        layout = draw.choice(("", "channels_last"))
        around = _allowed_tf32 if kind == "tf32" else _no_tf32
        one, weight = (
            t(batch, into, side, side, dtype=dtype, layout=layout),
            t(out, into // groups, size, size, dtype=dtype, layout=layout),
        )
        options = {"stride": stride, "padding": size // 2 if size < 16 else 0, "groups": groups}
        yield case("conv2d", F.conv2d, one, weight, note=f"{kind}", around=around, **options)


class _allowed_tf32:
    allowed = True

    def __enter__(self) -> None:
        torch.backends.cudnn.allow_tf32 = self.allowed

    def __exit__(self, *exception: object) -> None:
        torch.backends.cudnn.allow_tf32 = True


class _no_tf32(_allowed_tf32):
    allowed = False


def recurrent(draw: random.Random) -> Iterator[Case]:
    for _ in range(60):
        kind = draw.choice((torch.nn.LSTM, torch.nn.GRU))
        width, hidden, layers = draw.choice(WIDTHS[:18]), draw.choice(WIDTHS[:18]), draw.choice((1, 2, 4))
        batch, length = log_uniform(draw, 1, 256), log_uniform(draw, 8, 512)
        layer = Made(lambda device, k=kind, w=width, h=hidden, n=layers: k(w, h, n, batch_first=True, device=device))
        note = f"{width} {hidden} {layers}"
        yield case(kind.__name__, lambda one, x: one(x)[0], layer, t(batch, length, width, grad=False), note=note)


def optimizers(draw: random.Random) -> Iterator[Case]:
    """A step over as many parameters as a model has."""
    for _ in range(60):
        name = draw.choice(("AdamW", "AdamW", "AdamW", "SGD", "Adam"))
        how = draw.choice(("fused", "foreach", "foreach", "loop"))
        dtype = draw.choice((F32, BF16))
        count, size = log_uniform(draw, 4, 400), log_uniform(draw, 256, 3e7)
        if count * size > 1.5e9:
            continue
        options = {"fused": how == "fused", "foreach": how == "foreach"} | ({"momentum": 0.9} if name == "SGD" else {})

        def build(device: str, n: str = name, c: int = count, s: int = size, d: Any = dtype, o: Any = options) -> Any:
            parameters = [torch.nn.Parameter(torch.zeros(s, device=device, dtype=d)) for _ in range(c)]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            return getattr(torch.optim, n)(parameters, lr=1e-3, **o)

        note = f"{name} {how} {count} x {size} {str(dtype)[6:]}"
        yield case("optimizer.step", lambda one: one.step(), Made(build), note=note, backward=False)


def copies(draw: random.Random) -> Iterator[Case]:
    for _ in range(60):
        size, pinned = log_uniform(draw, 64, 2.5e8), draw.random() < 0.6
        there = t(size, fill="pinned" if pinned else "randn", device="cpu", grad=False)
        here, note = t(size, grad=False), "pinned" if pinned else "pageable"
        if draw.random() < 0.5:
            yield case("to device", lambda x, y: y.copy_(x, non_blocking=True), there, here, note=note, backward=False)
        else:
            yield case("to host", lambda x, y: y.copy_(x, non_blocking=True), here, there, note=note, backward=False)


KINDS = (matmul, matmul8, batched, attention, elementwise, conversions, reductions, norms, losses, indexing, creation, convolutions,
         recurrent, optimizers, copies)  # fmt: skip

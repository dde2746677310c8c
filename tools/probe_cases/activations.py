"""Pointwise operators: activations, arithmetic with promotion and broadcasting, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .spec import BF16, F16, F32, FLOATS, Case, Made, apply, case, mask, module, t

SHAPES = ((7,), (33, 65), (8, 128, 768), (1024, 1024))
UNARY = ("exp", "log", "sqrt", "rsqrt", "erf", "sin", "cos", "tanh", "sigmoid", "abs", "neg", "reciprocal", "square", "log1p", "expm1", "round", "sign", "floor",
         "log2", "tan", "asin", "atan", "sinh", "cosh", "lgamma", "digamma", "erfinv", "logit", "isnan", "isfinite", "isinf", "exp2", "sinc", "trunc", "frac",
         "nan_to_num", "signbit", "deg2rad", "angle", "positive", "zeros_like", "ones_like", "rand_like", "randn_like", "empty_like", "clone")  # fmt: skip
ACTIVATIONS = ("silu", "relu", "leaky_relu", "elu", "softplus", "mish", "hardswish", "hardsigmoid", "logsigmoid", "selu", "celu", "relu6", "hardtanh", "softsign",
               "tanhshrink", "softshrink", "hardshrink", "glu", "rrelu", "gelu")  # fmt: skip


def cases() -> Iterator[Case]:
    yield from activations()
    yield from dropouts()
    yield from unary()
    yield from binary()
    yield from conversions()


def activations() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in SHAPES:
            even = (*shape[:-1], shape[-1] + shape[-1] % 2)
            for name in ACTIVATIONS:
                yield case(name, getattr(F, name), t(*(even if name == "glu" else shape), dtype=dtype))
            yield case("gelu", F.gelu, t(*shape, dtype=dtype), approximate="tanh")
            yield case("rrelu", F.rrelu, t(*shape, dtype=dtype), training=True, note="training")
            yield case("relu_", lambda x: F.relu(x * 2, inplace=True), t(*shape, dtype=dtype))
            yield case("silu_", lambda x: F.silu(x * 2, inplace=True), t(*shape, dtype=dtype))
            yield case("threshold", F.threshold, t(*shape, dtype=dtype), 0.1, 0.0)
            yield case("swiglu", lambda a, b: F.silu(a) * b, t(*shape, dtype=dtype), t(*shape, dtype=dtype))
            yield case("new gelu", _new_gelu, t(*shape, dtype=dtype))
            yield case("quick gelu", lambda x: x * torch.sigmoid(1.702 * x), t(*shape, dtype=dtype))
            yield case("prelu", F.prelu, t(*shape, dtype=dtype), t(1, dtype=dtype), note="one weight")
            if len(shape) > 1:
                yield case("prelu", F.prelu, t(*shape, dtype=dtype), t(shape[1], dtype=dtype), note="weight per channel")
        for layout in ("transposed", "strided", "expanded"):
            yield case("relu", F.relu, t(64, 96, dtype=dtype, layout=layout), note=layout)
            yield case("gelu", F.gelu, t(64, 96, dtype=dtype, layout=layout), note=layout)
        yield case("relu", F.relu, t(2, 8, 16, 16, dtype=dtype, layout="channels_last"), note="channels_last")


def _new_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def dropouts() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((4, 7, 3), (2, 33, 65), (8, 128, 768), (4, 16, 32, 32)):
            x = t(*shape, dtype=dtype)
            for p in (0.1, 0.0, 0.5, 1.0):
                yield case("dropout", F.dropout, x, p)
            yield case("dropout", F.dropout, x, 0.1, training=False)
            yield case("dropout", F.dropout, t(*shape, dtype=dtype, grad=False), 0.1, note="no grad")
            yield case("dropout_", lambda x: F.dropout(x * 1, 0.1, inplace=True), x)
            yield case("native_dropout", torch.native_dropout, x, 0.1, True)
            yield case("alpha_dropout", F.alpha_dropout, x, 0.1, training=True)
            yield case("feature_dropout", F.dropout2d if len(shape) == 4 else F.dropout1d, x, 0.1)
            yield case("feature_alpha_dropout", F.feature_alpha_dropout, x, 0.1, training=True)
            yield case("drop_path", _drop_path, x)
        yield case("dropout", F.dropout, t(4, 64, 96, dtype=dtype, layout="transposed"), 0.1, note="transposed")
        yield case("dropout", F.dropout, t(4, 64, 96, dtype=dtype, layout="expanded"), 0.1, note="expanded")


def _drop_path(x: torch.Tensor) -> torch.Tensor:
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.9)
    return x * kept.div_(0.9)


def unary() -> Iterator[Case]:
    for dtype in FLOATS:
        for name in UNARY:
            yield case(name, getattr(torch, name), t(33, 65, dtype=dtype, fill="unit"))
            yield case(name, getattr(torch, name), t(1_000_003, dtype=dtype, fill="unit"))
        for shape in SHAPES:
            x = t(*shape, dtype=dtype, fill="unit")
            for power in (2, 3, 0.5, -1, 1, 0, 2.5, -0.5):
                yield case("pow", torch.pow, x, power)
            yield case("pow", torch.pow, x, x, note="tensor exponent")
            yield case("2 ** x", lambda x: 2**x, x)
            yield case("clamp", torch.clamp, x, 0.2, 0.8)
            yield case("clamp", torch.clamp, x, min=0.2)
            yield case("clamp", torch.clamp, x, x, x, note="tensors")
            yield case("logical_not", torch.logical_not, x)
    for dtype in (torch.int64, torch.bool, torch.uint8):
        x = t(33, 65, dtype=dtype)
        for op, call in (("bitwise_not", torch.bitwise_not), ("logical_not", torch.logical_not), ("float", lambda x: x.float()), ("exp", torch.exp),
                         ("bitwise_and", lambda x: x & x), ("true_divide", lambda x: x / 2), ("eq", lambda x: x == x), ("ge", lambda x: x >= 3),
                         ("add", lambda x: x + 1), ("mul", lambda x: x * 0.5), ("floor_divide", lambda x: x // 2), ("remainder", lambda x: x % 3)):  # fmt: skip
            yield case(op, call, x)


def binary() -> Iterator[Case]:
    arithmetic: dict[str, Any] = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum, "atan2": torch.atan2,
        "fmod": torch.fmod, "remainder": torch.remainder, "hypot": torch.hypot, "xlogy": torch.xlogy, "eq": torch.eq, "lt": torch.lt, "copysign": torch.copysign,
        "logaddexp": torch.logaddexp, "fmax": torch.fmax, "floor_divide": torch.floor_divide, "dist": torch.dist, "heaviside": torch.heaviside,
    }  # fmt: skip
    for a, b in ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32), (F16, BF16), (F32, torch.int64), (BF16, torch.int64), (BF16, torch.bool)):
        for name, call in arithmetic.items():
            yield case(name, call, t(64, 96, dtype=a, fill="unit"), t(64, 96, dtype=b), note="same shape")
        for first, second in (((64, 96), (96,)), ((64, 96), (64, 1)), ((8, 1, 32), (1, 16, 32)), ((64, 96), ()), ((1, 96), (64, 96)), ((2, 3, 64, 96), (3, 1, 1)),
                              ((4, 8, 128, 128), (4, 1, 1, 128)), ((16384, 768), (768,)), ((64, 1), (64, 1000))):  # fmt: skip
            for name in ("add", "mul", "div", "sub", "maximum"):
                yield case(name, arithmetic[name], t(*first, dtype=a), t(*second, dtype=b, fill="unit"), note="broadcast")
        for number in (2, 0.5):
            yield case("add scalar", torch.add, t(64, 96, dtype=a), number)
            yield case("mul scalar", torch.mul, t(64, 96, dtype=a), number)
            yield case("rsub scalar", lambda x, n: n - x, t(64, 96, dtype=a), number)
            yield case("div scalar", torch.div, t(64, 96, dtype=a), number)
            yield case("reciprocal scalar", lambda x, n: n / x, t(64, 96, dtype=a), number)
        yield case("mul cpu scalar", torch.mul, t(64, 96, dtype=a), t(dtype=b, device="cpu", grad=False))
        yield case("add_", lambda x, y: x.add_(y), t(64, 96, dtype=a, grad=False), t(64, 96, dtype=b, grad=False))
        yield case("mul_", lambda x, y: x.mul_(y), t(64, 96, dtype=a, grad=False), t(64, 96, dtype=b, grad=False))
        yield case("x += broadcast", lambda x, y: x.add_(y), t(64, 96, dtype=a, grad=False), t(96, dtype=b, grad=False))
        yield case("copy_", lambda x, y: x.copy_(y), t(64, 96, dtype=a, grad=False), t(64, 96, dtype=b, grad=False))
        if b.is_floating_point:
            three = (t(64, 96, dtype=a), t(64, 96, dtype=b), t(64, 96, dtype=a))
            yield case("addcmul", torch.addcmul, *three, value=0.5)
            yield case("addcdiv", torch.addcdiv, *three, value=0.5)
            yield case("lerp", torch.lerp, t(64, 96, dtype=a), t(64, 96, dtype=a), 0.3)
            yield case("lerp", torch.lerp, t(64, 96, dtype=a), t(64, 96, dtype=a), t(64, 96, dtype=a), note="tensor weight")
            yield case("x*x+x", lambda x, y: x * y + x, t(64, 96, dtype=a), t(64, 96, dtype=b))
    for first, second in (("transposed", ""), ("", "transposed"), ("strided", "transposed"), ("expanded", "expanded"), ("transposed", "transposed")):
        yield case("add", torch.add, t(64, 96, layout=first), t(64, 96, layout=second), note=f"{first} + {second}")
    yield case("add", torch.add, t(2, 8, 16, 16, layout="channels_last"), t(2, 8, 16, 16), note="channels_last + contiguous")
    yield case("add", torch.add, t(2, 8, 16, 16), t(2, 8, 16, 16, layout="channels_last"), note="contiguous + channels_last")
    yield case("add", torch.add, t(2, 8, 16, 16, layout="channels_last"), t(8, 1, 1), note="channels_last + broadcast")


def conversions() -> Iterator[Case]:
    dtypes = (F32, BF16, F16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)
    for a in dtypes[:-1]:
        for b in dtypes:
            yield case("to", lambda x, b: x.to(b), t(33, 65, dtype=a), b)
            yield case("to", lambda x, b: x.to(b), t(64, 96, dtype=a, layout="transposed"), b, note="transposed")
            yield case("copy_ dtype, layout", lambda x, y: x.copy_(y), t(64, 96, dtype=a, grad=False), Made(lambda d, b=b: torch.zeros(96, 64, device=d).to(b).t()))
            yield case("to gpu", lambda x, b: x.to("cuda" if torch.cuda.is_available() else "cpu", b), t(33, 65, dtype=a, device="cpu", grad=False), b)
            yield case("copy_ from cpu", lambda x, y: x.copy_(y), t(64, 96, dtype=a, grad=False), Made(lambda d, b=b: torch.zeros(64, 96).to(b)))
            yield case("copy_ to cpu", lambda x, y: y.copy_(x), t(64, 96, dtype=a, grad=False), Made(lambda d, b=b: torch.zeros(64, 96).to(b)))
    for dtype in FLOATS:
        gpu = "cuda" if torch.cuda.is_available() else "cpu"
        for layout in ("", "transposed", "strided", "narrowed", "expanded"):
            x = t(64, 96, dtype=dtype, layout=layout, grad=False)
            host = t(64, 96, dtype=dtype, layout=layout, grad=False, device="cpu")
            yield case("cpu", lambda x: x.cpu(), x, note=layout)
            yield case("clone", lambda x: x.clone(), x, note=layout)
            yield case("contiguous", lambda x: x.contiguous(), x, note=layout)
            yield case("to gpu", lambda x: x.to(gpu), host, note=layout)
            yield case("to gpu dtype", lambda x: x.to(gpu, F32), host, note=layout)
            yield case("copy_ from cpu", lambda x, y: x.copy_(y), x, host, note=layout)
            yield case("copy_ from cpu contiguous", lambda x, y: x.copy_(y), x, t(64, 96, dtype=dtype, grad=False, device="cpu"), note=layout)
            yield case("copy_ to cpu", lambda x, y: y.copy_(x), x, host if layout != "expanded" else t(64, 96, dtype=dtype, grad=False, device="cpu"), note=layout)
            yield case("zeros_like", torch.zeros_like, x, note=layout)
            yield case("tolist", lambda x: len(x.tolist()), x, note=layout)
        pinned = t(64, 96, dtype=dtype, fill="pinned", grad=False)
        yield case("to gpu pinned", lambda x: x.to(gpu, non_blocking=True), pinned)
        yield case("to gpu pinned dtype", lambda x: x.to(gpu, F32, non_blocking=True), pinned)
        yield case("item", lambda x: x.item(), t(dtype=dtype, grad=False))
        yield case("sum().item", lambda x: x.sum().item(), t(64, 96, dtype=dtype, grad=False))
        yield case("isnan().any().item", lambda x: x.isnan().any().item(), t(64, 96, dtype=dtype, grad=False))
        yield case("equal", torch.equal, t(64, 96, dtype=dtype, grad=False), t(64, 96, dtype=dtype, grad=False))
        yield case("allclose", torch.allclose, t(64, 96, dtype=dtype, grad=False), t(64, 96, dtype=dtype, grad=False))
        yield case("channels_last", lambda x: x.contiguous(memory_format=torch.channels_last), t(2, 8, 16, 16, dtype=dtype))
        yield case("to channels_last dtype", lambda x: x.to(F32, memory_format=torch.channels_last), t(2, 8, 16, 16, dtype=dtype))
        yield case("repr", repr, t(64, 96, dtype=dtype, grad=False))
        yield case("Flatten", apply, module(nn.Flatten), t(2, 8, 16, 16, dtype=dtype, layout="channels_last"))
    yield case("where scalar mask", lambda x, m: torch.where(m, x, torch.finfo(x.dtype).min), t(64, 96), mask(64, 96))

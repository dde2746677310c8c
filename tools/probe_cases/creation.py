"""Tensors made on the device: factories, random numbers, host data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from .spec import FLOATS, Case, Made, case, t

WHERE = Made(lambda device: device)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((7,), (33, 65), (1024, 1024)):
            for name in ("zeros", "ones", "empty", "rand", "randn"):
                yield case(name, _factory(name, dtype, shape), WHERE)
            yield case("full", lambda d, s=shape, y=dtype: torch.full(s, 0.5, device=d, dtype=y), WHERE)
            for name, args in (("normal_", ()), ("uniform_", ()), ("bernoulli_", (0.3,)), ("exponential_", ()), ("zero_", ()), ("fill_", (1.0,)), ("random_", ()),
                               ("log_normal_", ()), ("cauchy_", ()), ("geometric_", (0.3,)), ("clamp_", (-1.0, 1.0))):  # fmt: skip
                yield case(name, lambda x, n=name, a=args: getattr(x, n)(*a), t(*shape, dtype=dtype, grad=False))
            for name in ("bernoulli", "poisson"):
                yield case(name, getattr(torch, name), t(*shape, dtype=dtype, fill="unit", grad=False))
            yield case("normal", lambda x: torch.normal(x, 1.0), t(*shape, dtype=dtype, grad=False))
            yield case("normal", lambda x: torch.normal(x, x.abs()), t(*shape, dtype=dtype, grad=False), note="two tensors")
            for name in ("xavier_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_", "eye_"):
                if len(shape) == 2 and not (name == "orthogonal_" and shape[0] > 1000):
                    yield case(f"init.{name}", getattr(nn.init, name), t(*shape, dtype=dtype, grad=False))
        yield case("arange", lambda d, y=dtype: torch.arange(0, 100, 0.5, device=d, dtype=y), WHERE)
        yield case("linspace", lambda d, y=dtype: torch.linspace(0, 1, 100, device=d, dtype=y), WHERE)
        yield case("logspace", lambda d, y=dtype: torch.logspace(0, 1, 100, device=d, dtype=y), WHERE)
        yield case("eye", lambda d, y=dtype: torch.eye(100, device=d, dtype=y), WHERE)
        yield case("diag", torch.diag, t(100, dtype=dtype))
        yield case("diag_embed", torch.diag_embed, t(10, 100, dtype=dtype))
        yield case("tensor", lambda d, y=dtype: torch.tensor([1.0, 2.0], device=d, dtype=y), WHERE)
        yield case("scalar_tensor", lambda d, y=dtype: torch.tensor(1.0, device=d, dtype=y), WHERE)
        yield case("causal mask", lambda d, y=dtype: torch.triu(torch.full((100, 100), float("-inf"), device=d, dtype=y), diagonal=1), WHERE)
        yield case("new_zeros", lambda x: x.new_zeros(33, 65), t(3, dtype=dtype, grad=False))
    for n in (7, 1000, 100_000):
        yield case("arange", lambda d, n=n: torch.arange(n, device=d), WHERE)
        yield case("randint", lambda d, n=n: torch.randint(0, 100, (n,), device=d), WHERE)
        yield case("randperm", lambda d, n=n: torch.randperm(n, device=d), WHERE)
        yield case("from numpy", lambda d, n=n: torch.from_numpy(numpy.zeros(n)).to(d), WHERE)
        yield case("tensor from list", lambda d, n=n: torch.tensor(list(range(n)), device=d), WHERE)
        yield case("as_tensor", lambda d, n=n: torch.as_tensor(numpy.zeros(n, dtype="float32"), device=d), WHERE)
    for name in ("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"):
        yield case(name, lambda d, n=name: getattr(torch, n)(400, device=d), WHERE)
    yield case("Generator", lambda d: torch.randn(100, device=d, generator=torch.Generator(d).manual_seed(1)), WHERE)
    yield case("manual_seed", lambda d: torch.manual_seed(3) and None, WHERE)
    if torch.cuda.is_available():
        yield case("get_rng_state", lambda d: torch.cuda.get_rng_state(), WHERE)
        yield case("set_rng_state", lambda d: torch.cuda.set_rng_state(torch.cuda.get_rng_state()), WHERE)
    yield case("distributions.Normal", lambda m, s: torch.distributions.Normal(m, s).rsample(), t(64, 32), t(64, 32, fill="unit"))
    yield case("distributions.Normal.log_prob", lambda m, s: torch.distributions.Normal(m, s).log_prob(m.detach()), t(64, 32), t(64, 32, fill="unit"))
    yield case("distributions.Categorical", lambda x: torch.distributions.Categorical(logits=x).sample(), t(64, 32, grad=False))
    yield case("distributions.Categorical.log_prob", lambda x: _categorical(x), t(64, 32))
    yield case("distributions.kl", lambda a, b: torch.distributions.kl_divergence(torch.distributions.Normal(a, b), torch.distributions.Normal(b, a.exp())), t(64, 32), t(64, 32, fill="unit"))
    for dtype in (torch.qint8, torch.quint8):
        yield case("quantize_per_tensor", lambda x, y: torch.quantize_per_tensor(x, 0.1, 10, y), t(33, 65, grad=False), dtype)
    yield case("fake_quantize", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), t(33, 65))
    yield case("fake_quantize per channel", lambda x, s: torch.fake_quantize_per_channel_affine(x, s, torch.zeros_like(s, dtype=torch.int32), 0, -128, 127), t(33, 65), t(33, fill="unit", grad=False))
    yield case("to_sparse", lambda x: x.to_sparse(), t(33, 65, grad=False))
    yield case("sparse.mm", lambda x, y: torch.sparse.mm(x.to_sparse(), y), t(33, 65, grad=False), t(65, 20, grad=False))
    yield case("sparse csr mm", lambda x, y: x.to_sparse_csr() @ y, t(33, 65, grad=False), t(65, 20, grad=False))
    yield case("sparse coalesce", lambda x: torch.sparse_coo_tensor(torch.randint(0, 30, (2, 500), device=x.device), torch.rand(500, device=x.device), (30, 30)).coalesce(), t(1, grad=False))
    yield case("sparse to_dense", lambda x: x.to_sparse().to_dense(), t(33, 65, grad=False))


def _factory(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[str], Any]:
    return lambda device: getattr(torch, name)(shape, device=device, dtype=dtype)


def _categorical(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).log_prob(torch.zeros(logits.shape[0], device=logits.device, dtype=torch.long))

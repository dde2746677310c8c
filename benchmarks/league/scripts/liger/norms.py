"""Normalisations."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def build(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """What one round calls, forward and backward."""
    kernel, config, late = case["kernel"], case["config"], case["late"]
    if kernel == "megatron_rms_norm":
        return megatron(case)
    dtype, eps = config["dtype"], config.get("eps", 1e-6)
    size = config["hidden_size"] if late else case["x"]
    rows = case["x"] if late else config["M"]
    shape: tuple[int, ...] = (rows, size)
    if kernel == "group_norm":
        shape = (max(1, rows // config["H"]) if late else rows, size, config["H"])
    makers = layers_of(kernel, size, eps, config)
    provider = "plain" if case["provider"] in ("torch", "huggingface") else case["provider"]
    if late:
        # Only the layer that is measured is made.
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        residual = torch.randn(shape, dtype=dtype, requires_grad=True) if kernel == "fused_add_rms_norm" else None
        layer = makers[provider]()
        if kernel in ("layer_norm", "group_norm"):
            layer = layer.to(dtype)
        if residual is not None:
            return lambda: layer(x, residual)[0], None
        return lambda: layer(x), None
    # All of them are made, with a gradient that is kept.
    made = {name: make() for name, make in makers.items()}
    x = torch.randn(shape, dtype=dtype)
    if kernel == "fused_add_rms_norm":
        residual = torch.randn(shape, dtype=dtype)
        gradients = torch.randn_like(x), torch.randn_like(residual)
        x.requires_grad_(True), residual.requires_grad_(True)
        return lambda: made[provider](x, residual), lambda outputs: torch.autograd.backward(outputs, gradients)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: made[provider](x), lambda output: output.backward(gradient, retain_graph=True)


def layers_of(kernel: str, size: int, eps: float, config: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What makes the layer, by provider. Where Liger is not installed, plain layers stand in for its parameters."""
    groups = size // config.get("channels_per_group", size)
    plain: Callable[[], Any] = {
        "layer_norm": partial(nn.LayerNorm, size, eps=eps), "rms_norm": partial(RmsNorm, size, eps),
        "group_norm": partial(nn.GroupNorm, groups, size, eps=eps), "fused_add_rms_norm": partial(AddedRmsNorm, size, eps),
        "dyt": partial(TanhNorm, size, config.get("beta")), "poly_norm": partial(PolynomialNorm, eps),
    }[kernel]  # fmt: skip
    try:
        from liger_kernel import transformers as liger
        from liger_kernel.transformers.group_norm import LigerGroupNorm
    except ImportError:
        return {"plain": plain, "liger": plain}
    if kernel == "fused_add_rms_norm":
        with_liger = partial(AddedRmsNorm, size, eps, liger.LigerRMSNorm)
        fused = partial(liger.LigerFusedAddRMSNorm, size, eps=eps)
        return {"liger_fused_add_rms_norm": fused, "plain": plain, "liger_rms_norm": with_liger}
    fused = {
        "layer_norm": partial(liger.LigerLayerNorm, size, eps=eps), "rms_norm": partial(liger.LigerRMSNorm, size, eps=eps),
        "group_norm": partial(LigerGroupNorm, size, groups, eps=eps),
        "dyt": partial(liger.LigerDyT, size, config.get("beta")), "poly_norm": partial(liger.LigerPolyNorm, eps=eps),
    }[kernel]  # fmt: skip
    found = {"liger": fused, "plain": plain}
    return found | {"torch_compile": lambda: torch.compile(plain())} if kernel == "dyt" else found


class RmsNorm(nn.Module):
    """Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class AddedRmsNorm(nn.Module):
    """A residual is added first; the norm is written out, or Liger's, which has a weight of its own."""

    def __init__(self, size: int, eps: float, norm: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.norm = norm(size, eps, in_place=False) if norm else None

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        dtype = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        if self.norm is None:
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + self.eps)
        else:
            x = self.norm(x)
        return self.weight * x.to(dtype), residual.to(dtype)


class TanhNorm(nn.Module):
    """Dynamic tanh in place of a norm."""

    def __init__(self, size: int, shifted: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * 0.5)
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size)) if shifted else None

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.gamma * torch.tanh(x * self.alpha)
        return scaled if self.beta is None else scaled + self.beta


class PolynomialNorm(nn.Module):
    """The weighted sum of three normalised powers."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.eps = eps

    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        cubes, squares, same = x**3, x**2, x**1
        third, second, first = self.normalised(cubes), self.normalised(squares), self.normalised(same)
        output = self.weight[0] * third + self.weight[1] * second + self.weight[2] * first + self.bias
        return output.to(dtype)


def megatron(case: dict[str, Any]) -> tuple[Callable, Callable]:
    size, config = case["x"], case["config"]
    # Megatron's own wrapper makes torch's RMSNorm.
    layer: nn.Module = nn.RMSNorm(size, eps=1e-6)
    if case["provider"] == "liger":
        from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm

        settings = SimpleNamespace(
            normalization="RMSNorm", sequence_parallel=False, layernorm_zero_centered_gamma=False, persist_layer_norm=False,
            memory_efficient_layer_norm=False,
        )  # fmt: skip
        layer = LigerMegatronRMSNorm(settings, size, eps=1e-6)
    layer = layer.to(torch.bfloat16)
    x = torch.randn(config["S"], config["B"], size, dtype=torch.bfloat16, requires_grad=True)
    return lambda: layer(x), lambda output: output.sum().backward()

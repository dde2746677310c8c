"""Residual sums with their RMS norm (in FP32, on the residual as stored), and gated activations: one pass each."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tonnage.serve.kernels.common import jit, next_power_of_2, tl, wide

_GATED_BLOCK = 1024


def add_norm_reference(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (RMS norm of the sum, the sum, in place of `residual` if given); `offset` is added to the weight (Gemma: 1)."""
    residual = hidden if residual is None else residual.add_(hidden)
    x = residual.to(wide(residual.dtype))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.to(x.dtype) + offset)
    return normed.to(hidden.dtype), residual


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Return silu(gate) × up of rows that hold both halves [T, 2i]; [T, i]."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """Return tanh-approximated gelu(gate) × up of rows that hold both halves [T, 2i]; [T, i]."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def add_norm_triton(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Like `add_norm_reference`, with one program per row."""
    count, width = hidden.shape
    normed = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
    if count:
        _add_norm_kernel[(count,)](
            hidden, hidden if residual is None else residual, weight, normed, HIDDEN_STRIDE=hidden.stride(0),
            RESIDUAL_STRIDE=hidden.stride(0) if residual is None else residual.stride(0), WIDTH=width,
            PADDED_WIDTH=next_power_of_2(width), ADD=residual is not None, EPS=eps, OFFSET=offset,
            num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return normed, hidden if residual is None else residual


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if count:
        _gated_kernel[(count, -(-width // _GATED_BLOCK))](
            gate_up, out, STRIDE=gate_up.stride(0), WIDTH=width, BLOCK=_GATED_BLOCK, GELU=gelu, num_warps=4
        )
    return out


silu_mul_triton = partial(_gated, gelu=False)
gelu_tanh_mul_triton = partial(_gated, gelu=True)


@jit
def _add_norm_kernel(
    hidden, residual, weight, normed, HIDDEN_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr, ADD: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_WIDTH)
    inside = dims < WIDTH
    x = tl.load(hidden + row * HIDDEN_STRIDE + dims, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if ADD:
        at = residual + row * RESIDUAL_STRIDE + dims
        kept = (x + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, kept, mask=inside)
        x = kept.to(tl.float32)
    size = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    tl.store(normed + row * WIDTH + dims, (x * size * scale).to(normed.dtype.element_ty), mask=inside)


@jit
def _gated_kernel(gate_up, out, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < WIDTH
    gate = tl.load(gate_up + row * STRIDE + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * STRIDE + WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
    # tanh-GELU is x × sigmoid(2z), since (1 + tanh z) / 2 = sigmoid(2z).
    power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    gated = gate / (1.0 + tl.exp2(power * -1.4426950408889634))
    tl.store(out + row * WIDTH + dims, (gated * up).to(out.dtype.element_ty), mask=inside)

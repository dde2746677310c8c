"""Layer norm and RMS norm, fused with the addition of a residual."""

from typing import Any

import torch
from torch import Tensor, nn


class LayerNormFn(torch.autograd.Function):
    """Saves the input, or its sum with the residual, and two numbers per row (one for RMS norm) for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, dropout: float,
        prenorm: bool, residual_in_fp32: bool, is_rms: bool, out_dtype: torch.dtype | None,
    ) -> Any:  # fmt: skip
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        x = x if x.stride(-1) == 1 else x.contiguous()
        kind = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
        y = torch.empty_like(x, dtype=out_dtype or x.dtype)
        adds = residual is not None or kind != x.dtype or dropout > 0
        summed = torch.empty_like(x, dtype=kind) if adds else x
        mean = None if is_rms else torch.empty(len(x), device=x.device)
        deviation = torch.empty(len(x), device=x.device)
        seeds = torch.randint(2**32, (len(x),), device=x.device) if dropout > 0 else None
        ctx.save_for_backward(summed, weight, bias, seeds, mean, deviation)
        ctx.shape, ctx.prenorm, ctx.dropout = shape, prenorm, dropout
        ctx.has_residual, ctx.kind = residual is not None, x.dtype
        return (y.reshape(shape), summed.reshape(shape)) if prenorm else y.reshape(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *rest: Tensor) -> Any:
        x, weight, bias, *_ = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx = torch.empty_like(x, dtype=ctx.kind)
        apart = ctx.has_residual and (dx.dtype != x.dtype or ctx.dropout > 0)
        dresidual = torch.empty_like(x) if apart else dx
        rows = 8 * torch.cuda.get_device_properties(x.device).multi_processor_count
        sums = [torch.empty(rows, x.shape[1], device=x.device) for t in (weight, bias) if t is not None]
        dweight = sums[0].sum(0).to(weight.dtype)
        dbias = sums[1].sum(0).to(bias.dtype) if bias is not None else None
        to_residual = dresidual.reshape(ctx.shape) if ctx.has_residual else None
        return dx.reshape(ctx.shape), dweight, dbias, to_residual, None, None, None, None, None


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: None = None,
    weight1: None = None, bias1: None = None, eps: float = 1e-6, dropout_p: float = 0.0, rowscale: None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, zero_centered_weight: bool = False,
    is_rms_norm: bool = False, return_dropout_mask: bool = False, out_dtype: torch.dtype | None = None,
    out: None = None, residual_out: None = None,
) -> Any:  # fmt: skip
    """Return the norm of each row of `x`, or of its sum with the residual; `prenorm` also returns that sum."""
    given = {"x1": x1, "weight1": weight1, "rowscale": rowscale, "out": out, "residual_out": residual_out}
    lacking = [name for name, value in given.items() if value is not None]
    lacking += ["return_dropout_mask"] * return_dropout_mask
    if lacking:
        raise NotImplementedError(f"The stand-in of flash-attn's norms does not know {', '.join(lacking)}.")
    return LayerNormFn.apply(x, weight, bias, residual, dropout_p, prenorm, residual_in_fp32, is_rms_norm, out_dtype)


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, **options: Any) -> Any:
    """Return the RMS norm, with the options of `layer_norm_fn`."""
    return layer_norm_fn(x, weight, bias, residual, **{**options, "is_rms_norm": True})


class RMSNorm(nn.Module):
    """The RMS norm with a learned weight."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, zero_centered_weight: bool = False,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.dropout_p, self.zero_centered_weight = eps, dropout_p, zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        dropout = self.dropout_p if self.training else 0.0
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, dropout_p=dropout, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )  # fmt: skip

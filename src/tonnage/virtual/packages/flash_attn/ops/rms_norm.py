"""RMS norm under its older name, a separate CUDA extension; modelled with the memory of the Triton kernel."""

from typing import Any

from torch import Tensor

from .triton.layer_norm import RMSNorm, rms_norm_fn

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Any:
    return rms_norm_fn(x, weight, None, eps=epsilon)

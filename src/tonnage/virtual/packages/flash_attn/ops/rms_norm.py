"""RMS norm by its older name. Its CUDA extension is one of its own; here it has the memory of the Triton kernel."""

from typing import Any

from torch import Tensor

from .triton.layer_norm import RMSNorm, rms_norm_fn

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Any:
    """The RMS norm of each row."""
    return rms_norm_fn(x, weight, None, eps=epsilon)

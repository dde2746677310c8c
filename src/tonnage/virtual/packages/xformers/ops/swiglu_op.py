"""SwiGLU, which this version of xformers computes with torch's operators."""

import torch.nn.functional as F
from torch import Tensor, nn

from .unbind import unbind


def swiglu(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, w3: Tensor, b3: Tensor | None,
    *, op: None = None,
) -> Tensor:  # fmt: skip
    """Return `w3(silu(w1(x)) * w2(x))`."""
    rows = x.reshape(-1, x.shape[-1])
    first, second = F.linear(rows, w1, b1), F.linear(rows, w2, b2)
    hidden = F.silu(first) * second
    return F.linear(hidden, w3, b3).reshape(*x.shape[:-1], -1)


class SwiGLU(nn.Module):
    """SwiGLU with its weights; those of the first two products are packed."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = unbind(self.w12.weight.unflatten(0, (2, -1)), 0)
        b1, b2 = unbind(self.w12.bias.unflatten(0, (2, -1)), 0) if self.w12.bias is not None else (None, None)
        return swiglu(x, w1, b1, w2, b2, self.w3.weight, self.w3.bias)

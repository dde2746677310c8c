"""What a forward pass does besides matrix products, each twice: in Triton for CUDA tensors, and in plain PyTorch.

The plain version is the kernel's meaning and its test's reference; it serves the CPU, and cards without Triton.
`<name>` chooses by its first tensor, `<name>_reference` is always the plain one.

| name            | what                                                                     | bound by   |
|-----------------|--------------------------------------------------------------------------|------------|
| attend_decode   | attention of one new token a sequence over its pages                     | memory     |
| attend_chunks   | attention of pieces of prompts over their pages, causal                  | arithmetic |
| store           | norm by head, rotary positions, keys and values written to their pages   | memory     |
| add_norm        | residual sum and its RMS norm                                            | memory     |
| silu_mul, gelu_tanh_mul | gated activations of merged gate and up projections              | memory     |
| draw            | a token from each row of logits, by counted random numbers               | memory     |
| least           | the least logit of each row that top-k, top-p and min-p leave            | memory     |
| matmul8         | product with a weight in 8 bits                                          | memory     |
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from tonnage.serve.kernels.chunks import attend_chunks_reference, attend_chunks_triton
from tonnage.serve.kernels.decode import attend_decode_reference, attend_decode_triton
from tonnage.serve.kernels.draw import draw_reference, draw_triton
from tonnage.serve.kernels.language import HAS_TRITON
from tonnage.serve.kernels.least import least_reference, least_triton
from tonnage.serve.kernels.matmul8 import matmul8_reference, matmul8_triton
from tonnage.serve.kernels.norm import (
    add_norm_reference,
    add_norm_triton,
    gelu_tanh_mul_reference,
    gelu_tanh_mul_triton,
    silu_mul_reference,
    silu_mul_triton,
)
from tonnage.serve.kernels.store import store_reference, store_triton

__all__ = [
    "add_norm",
    "add_norm_reference",
    "attend_chunks",
    "attend_chunks_reference",
    "attend_decode",
    "attend_decode_reference",
    "draw",
    "draw_reference",
    "gelu_tanh_mul",
    "gelu_tanh_mul_reference",
    "least",
    "least_reference",
    "matmul8",
    "matmul8_reference",
    "silu_mul",
    "silu_mul_reference",
    "store",
    "store_reference",
]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def _chosen(plain: _Kernel, fast: Callable[..., Any]) -> _Kernel:
    """Choose by the device of the first argument."""
    if not HAS_TRITON:
        return plain

    @wraps(plain)
    def choose(first: Tensor, *others: Any, **options: Any) -> Any:
        return (fast if first.is_cuda else plain)(first, *others, **options)

    return cast(_Kernel, choose)


attend_decode = _chosen(attend_decode_reference, attend_decode_triton)
attend_chunks = _chosen(attend_chunks_reference, attend_chunks_triton)
store = _chosen(store_reference, store_triton)
add_norm = _chosen(add_norm_reference, add_norm_triton)
silu_mul = _chosen(silu_mul_reference, silu_mul_triton)
gelu_tanh_mul = _chosen(gelu_tanh_mul_reference, gelu_tanh_mul_triton)
draw = _chosen(draw_reference, draw_triton)
least = _chosen(least_reference, least_triton)
matmul8 = _chosen(matmul8_reference, matmul8_triton)

"""Operations of a forward pass besides matrix products, each in Triton for CUDA tensors and in plain PyTorch.

The plain version defines the kernel and is its test's reference; it runs on the CPU, and without Triton.
`<name>` chooses by its first tensor, `<name>_reference` is always the plain one.

| name                    | what                                                               | bound by |
|-------------------------|--------------------------------------------------------------------|----------|
| attend_decode           | attention of one new token per sequence over its pages             | memory   |
| attend_chunks           | causal attention of prompt chunks over their pages                 | compute  |
| store                   | per-head norm, rotary embedding, keys and values written to pages  | memory   |
| add_norm                | residual sum and its RMS norm                                      | memory   |
| silu_mul, gelu_tanh_mul | gated activations of merged gate and up projections                | memory   |
| sample                  | a sampled token per row of logits, by counter-based random numbers | memory   |
| logit_threshold         | the lowest logit of each row that passes top-k, top-p and min-p    | memory   |
| matmul8                 | product with an 8-bit weight                                       | memory   |
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from tonnage.serve.kernels.chunks import attend_chunks_reference, attend_chunks_triton
from tonnage.serve.kernels.common import HAS_TRITON
from tonnage.serve.kernels.decode import attend_decode_reference, attend_decode_triton
from tonnage.serve.kernels.logit_threshold import logit_threshold_reference, logit_threshold_triton
from tonnage.serve.kernels.matmul8 import matmul8_reference, matmul8_triton
from tonnage.serve.kernels.norm import (
    add_norm_reference,
    add_norm_triton,
    gelu_tanh_mul_reference,
    gelu_tanh_mul_triton,
    silu_mul_reference,
    silu_mul_triton,
)
from tonnage.serve.kernels.sample import sample_reference, sample_triton
from tonnage.serve.kernels.store import store_reference, store_triton

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def _chosen(plain: _Kernel, fast: Callable[..., Any]) -> _Kernel:
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
sample = _chosen(sample_reference, sample_triton)
logit_threshold = _chosen(logit_threshold_reference, logit_threshold_triton)
matmul8 = _chosen(matmul8_reference, matmul8_triton)

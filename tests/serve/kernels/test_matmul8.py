"""Products with 8-bit weights, plain: against the widened weight in FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.pages import far
from tonnage.serve.kernels import matmul8


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@settings(max_examples=25)
@given(rows=st.integers(0, 6), depth=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 99))
def test_it_is_the_product_with_what_the_weight_stands_for(
    dtype: torch.dtype, rows: int, depth: int, outputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight8 = (
        torch.randn(rows, depth, dtype=torch.float64),
        (torch.randn(outputs, depth) * 40).clamp(-127, 127).to(dtype),
    )
    scales = torch.rand(outputs, dtype=torch.float64)
    truth = x @ (weight8.double() * scales[:, None]).T
    assert far(matmul8(x, weight8, scales), truth) < 1e-12
    assert far(matmul8(x.float(), weight8, scales.float()), truth) < 1e-5

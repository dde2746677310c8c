"""x · (weight × scale)ᵀ of an 8-bit weight: bound by reading it for few rows; for many it is widened for the library."""

import torch
from torch import Tensor
from torch.nn import functional

from tonnage.serve.kernels.common import jit, next_power_of_2, tl, wide

MOST_ROWS = 256  # above which the weight is widened


def matmul8_reference(x: Tensor, weight8: Tensor, scales: Tensor) -> Tensor:
    """Return [T, n] from x [T, k], weight8 [n, k] in int8 or float8_e4m3fn, and scales [n]."""
    dtype = wide(x.dtype)
    return (functional.linear(x.to(dtype), weight8.to(dtype)) * scales.to(dtype)).to(x.dtype)


def matmul8_triton(x: Tensor, weight8: Tensor, scales: Tensor) -> Tensor:
    """Like `matmul8_reference`; both accumulate in FP32."""
    (rows, depth), outputs = x.shape, weight8.shape[0]
    if rows > MOST_ROWS:
        return functional.linear(x, weight8.to(x.dtype)).mul_(scales)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tall = min(max(16, next_power_of_2(rows)), 64)
    broad = 32 if outputs <= 4096 else 64 if tall < 64 else 128
    _matmul8_kernel[(-(-outputs // broad), -(-rows // tall))](
        x, weight8, scales, out, rows, ROW_STRIDE=x.stride(0), DEPTH=depth, OUTPUTS=outputs, TALL=tall, BROAD=broad,
        DEEP=128, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["rows"])
def _matmul8_kernel(
    x, weight8, scales, out, rows, ROW_STRIDE: tl.constexpr, DEPTH: tl.constexpr, OUTPUTS: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BROAD + tl.arange(0, BROAD)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    deep = tl.arange(0, DEEP)
    line = row.to(tl.int64)[:, None] * ROW_STRIDE
    weight_line = column.to(tl.int64)[None, :] * DEPTH
    total = tl.zeros([TALL, BROAD], tl.float32)
    for at in range(0, DEPTH, DEEP):
        inside = at + deep < DEPTH
        left = tl.load(x + line + (at + deep)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight8 + weight_line + (at + deep)[:, None], mask=inside[:, None] & (column < OUTPUTS)[None, :], other=0.0
        )
        total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
    scale = tl.load(scales + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)
    at_out = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    inside_out = (row < rows)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(out + at_out, (total * scale[None, :]).to(out.dtype.element_ty), mask=inside_out)

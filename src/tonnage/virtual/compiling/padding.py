"""Decides whether Inductor pads an unaligned matrix product, which it would find out by timing both versions.

Tensor cores load whole rows that begin at multiples of 16 bytes; a product with smaller alignment runs at a fraction
of their rate, and padding pays unless copying the operands takes longer than it saves. The rates below are medians
over 1,508 products timed on an H200 as Inductor times them; on held-out products, they agree with the card in 92 %
(95 % where the times differ by 15 % or more). Other cards are assumed to reach the same shares of their peaks.
"""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tonnage.hardware.gpu import Gpu
from tonnage.virtual.cuda.patches import Patches

# Shares of the card's dense peak, by the smallest row alignment in bytes, in descending order.
HALF_RATES = {16: 0.93, 4: 0.246, 2: 0.120}
TF32_RATES = {16: 0.735, 4: 0.249}
FP32_RATES = {4: 0.69}
PRODUCT_BANDWIDTH, COPY_BANDWIDTH, TRANSPOSED_COPY_BANDWIDTH = 0.69, 0.55, 0.205  # shares of the card's bandwidth
PRODUCT_S, COPY_S = 11e-6, 2.6e-6  # launch overhead
GAIN = 1.1  # the speedup that Inductor requires of padding


@dataclass(frozen=True)
class Operand:
    """A matrix of the product: its sides, the padding of each, its layout, and whether it is created already padded."""

    rows: int
    columns: int
    more_rows: int
    more_columns: int
    transposed: bool
    is_padded_already: bool

    def row_bytes(self, element_bytes: int) -> int:
        """Return the bytes from one row in memory to the next."""
        return (self.rows if self.transposed else self.columns) * element_bytes

    def copied_bytes(self, element_bytes: int) -> int:
        """Return the bytes that padding reads and writes; each padded side takes a copy."""
        if self.is_padded_already:
            return 0
        sides = (self.more_rows > 0) + (self.more_columns > 0)
        padded = (self.rows + self.more_rows) * (self.columns + self.more_columns)
        return sides * (self.rows * self.columns + padded) * element_bytes


def decide_padding(pad_mm: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Replace Inductor's timing comparison; both products still run once, because their buffers count."""
    plain, gain = pad_mm.should_pad_bench_key, [False]

    def should_pad_bench_key(match: Any, mat1: Any, mat2: Any, *arguments: Any, **keywords: Any) -> Any:
        operands = []
        for name, matrix in (("mat1", mat1), ("mat2", mat2)):
            more = [pad_mm.get_padded_length(side, pad_mm.get_alignment_size(matrix)) for side in matrix.shape[-2:]]
            is_padded = pad_mm.should_exclude_padding_time(match, name)
            rows, columns = _sides(matrix)[-2:]
            operands.append(Operand(rows, columns, more[0], more[1], matrix.stride(-1) != 1, is_padded))
        gain[0] = padding_pays(gpu, mat1.dtype, math.prod(_sides(mat1)[:-2]), *operands)
        return plain(match, mat1, mat2, *arguments, **keywords)

    patches.set(pad_mm, "should_pad_bench_key", should_pad_bench_key)
    patches.set(pad_mm, "is_padded_faster", lambda *_: gain[0])


def _sides(matrix: Any) -> list[int]:
    """Return the sizes, or Dynamo's hints where they are symbolic."""
    return [int(side) if isinstance(side, int) else side.node.hint for side in matrix.shape]


def padding_pays(gpu: Gpu, dtype: torch.dtype, batch: int, left: Operand, right: Operand) -> bool:
    """Whether the padded product, with its copies, is faster by the margin that Inductor requires."""
    m, k, n = left.rows, left.columns, right.columns
    element_bytes = dtype.itemsize
    rows = (left.row_bytes(element_bytes), right.row_bytes(element_bytes), n * element_bytes)
    alignment = min(math.gcd(row, 16) for row in rows)
    moved_s = batch * (m * k + k * n + m * n) * element_bytes / (PRODUCT_BANDWIDTH * gpu.bandwidth_bytes_per_s)
    plain_s = PRODUCT_S + moved_s + 2 * batch * m * n * k / _rate(gpu, dtype, alignment)
    # Padded: every row is aligned, and the operands are copied first.
    sides = (m + left.more_rows) * (k + left.more_columns) * (n + right.more_columns)
    padded_s = PRODUCT_S + moved_s + 2 * batch * sides / _rate(gpu, dtype, 16)
    for operand in (left, right):
        copied_bytes = batch * operand.copied_bytes(element_bytes)
        share = TRANSPOSED_COPY_BANDWIDTH if operand.transposed else COPY_BANDWIDTH
        padded_s += COPY_S * (copied_bytes > 0) + copied_bytes / (share * gpu.bandwidth_bytes_per_s)
    return plain_s > GAIN * padded_s


def _rate(gpu: Gpu, dtype: torch.dtype, alignment: int) -> float:
    """Return the FLOP/s that a product with rows of this alignment reaches."""
    if dtype in (torch.float16, torch.bfloat16):
        kind, shares = "fp16", HALF_RATES
    elif torch.backends.cuda.matmul.allow_tf32 and "tf32" in gpu.rates:
        kind, shares = "tf32", TF32_RATES
    else:
        kind, shares = "fp32", FP32_RATES
    return gpu.rates[kind] * next(share for least, share in shares.items() if alignment >= least)

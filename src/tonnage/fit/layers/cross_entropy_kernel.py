"""A Triton kernel for the cross-entropy of rows of logits, with their gradient in place. Imported only with Triton.

One program reads a row twice: for the sum of its exponentials, and to write. That is 6 bytes per BF16 element, most
of the second pass from cache, where PyTorch's operators move 26 and keep an FP32 copy.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096


def losses_and_gradient_(
    logits: Tensor, label: Tensor, mass: Tensor, upstream: Tensor | None, losses: Tensor, classes: int
) -> None:
    """Write each row's loss; with an upstream factor per row, also replace the logits by their gradient.

    A row has weight `mass` and is ignored if that is zero. Columns from `classes` on are padding.
    """
    with torch.cuda.device_of(logits):
        _rows_kernel[(logits.shape[0],)](
            logits, label, mass, mass if upstream is None else upstream, losses, logits.stride(0), classes,
            logits.shape[1], DIFFERENTIATE=upstream is not None, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip


@triton.jit
def _rows_kernel(
    logits, label, mass, upstream, losses, stride, classes, width,
    DIFFERENTIATE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    own_column = tl.load(label + row)
    weight = tl.load(mass + row)
    # Read before the loop: its reductions are barriers, so no thread writes before all have read.
    own = tl.load(start + own_column).to(tl.float32)

    largest = -float("inf")
    total = 0.0
    for first in range(0, classes, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        value = tl.load(start + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(value, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # only minus infinity so far
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift), axis=0)
        largest = higher
    normaliser = largest + tl.log(total)
    tl.store(losses + row, tl.where(weight == 0.0, 0.0, weight * (normaliser - own)))

    if DIFFERENTIATE:
        factor = weight * tl.load(upstream + row)
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            value = tl.load(start + column, mask=column < classes, other=-float("inf")).to(tl.float32)
            gradient = factor * (tl.exp(value - normaliser) - tl.where(column == own_column, 1.0, 0.0))
            gradient = tl.where(column < classes, tl.where(weight == 0.0, 0.0, gradient), 0.0)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < width)

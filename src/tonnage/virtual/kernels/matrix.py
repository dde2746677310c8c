"""Matrix products: copies of operands that cuBLAS cannot read, and the workspaces of cuBLASLt.

The workspace of cuBLAS itself is taken by the generic kernel (`LIBRARIES` in the package); values are not computed
here.
"""

from collections.abc import Callable
from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain, scratch
from tonnage.virtual.session import active

_LT_TYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


def _unreadable(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS cannot read the matrix: neither rows nor columns are contiguous."""
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    if (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows)):
        return False
    return not _is_dense(matrix)


def _is_dense(matrix: torch.Tensor) -> bool:
    """Whether there are no gaps and overlaps, in any order; a dimension of size 1 may have any stride."""
    expected = 1
    for step, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _unreadable_batch(batch: torch.Tensor) -> bool:
    """Whether cuBLAS cannot read the matrices of a batch; a stride of 0 is not a leading dimension."""
    (_, rows, columns), (_, row_step, column_step) = batch.shape, batch.stride()
    if (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows)):
        return False
    return not (batch.is_contiguous() and row_step != 0 and column_step != 0)


def _takes_lt(bias: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, beta: Any, out: torch.Tensor) -> bool:
    """Whether cuBLASLt is used, which adds a vector bias in the same kernel."""
    return (
        mat1.numel() > 0
        and mat2.numel() > 0
        and bias.dim() == 1
        and beta == 1
        and bias.dtype in _LT_TYPES
        and bias.shape[0] == mat2.shape[1]
        and bias.is_contiguous()
        and out.is_contiguous()
        and mat2.shape[0] > 1
        and mat2.shape[1] > 1
    )


def _unreadable_for_vectors(matrix: torch.Tensor) -> bool:
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    by_column = row_step == 1 and column_step >= max(1, rows)
    by_row = column_step == 1 and row_step >= max(1, columns)
    return matrix.numel() > 0 and not (by_column or by_row)


def _register(name: str, unreadable: Callable[[torch.Tensor], bool], first: int = 0, last: int = 1) -> None:
    """Register a product of the arguments from `first` to `last`."""
    by_shape, may_take_lt = plain(name), "addmm" in name

    @kernel(name)
    def multiply(*given: Any, **others: Any) -> torch.Tensor:
        result: torch.Tensor = by_shape(*given, **others)
        # Operands that the library needs in another layout are copied, all at once.
        operands = [each for each in given[last : first - 1 if first else None : -1] if unreadable(each)]
        held = [each.clone(memory_format=torch.contiguous_format) for each in operands]
        while held:
            held.pop()
        if may_take_lt and _takes_lt(given[0], given[1], given[2], others.get("beta", 1), result):
            active().workspaces.use("cublaslt")
        return result


def _register_lt(name: str, since: tuple[int, int] = (2, 0)) -> None:
    """Register a product in cuBLASLt, which has a workspace since this version."""
    by_shape = plain(name)

    @kernel(name)
    def multiply(*operands: Any, **others: Any) -> torch.Tensor:
        result: torch.Tensor = by_shape(*operands, **others)
        if active().device.torch_version >= since:
            active().workspaces.use("cublaslt")
        return result


for _name in ("mm", "mm.out"):
    _register(_name, _unreadable)
for _name in ("addmm", "addmm.out", "addmm_", "_addmm_activation", "_addmm_activation.out"):
    _register(_name, _unreadable, 1, 2)
for _name in ("bmm", "bmm.out"):
    _register(_name, _unreadable_batch)
for _name in ("baddbmm", "baddbmm.out", "baddbmm_"):
    _register(_name, _unreadable_batch, 1, 2)
for _name in ("addmv", "addmv.out", "addmv_"):
    _register(_name, _unreadable_for_vectors, 1, 1)
for _name in ("_int_mm", "_int_mm.out"):
    _register_lt(_name, since=(2, 9))
for _name in ("_scaled_mm", "_scaled_mm.out"):
    _register_lt(_name)


# Grouped products


@kernel("_grouped_mm")
def grouped_mm(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Use one CUTLASS kernel for bfloat16 on Hopper and Blackwell, else one product per group."""

    out = _grouped_output(self, mat2, offs, out_dtype or self.dtype)
    device = active().device
    fused = device.gpu.compute_capability[0] in (9, 10) and self.dtype == torch.bfloat16
    if not fused:
        active().workspaces.use("cublas")
        return out
    groups = mat2.shape[0] if mat2.dim() == 3 else self.shape[0] if self.dim() == 3 else _length(offs)
    arguments = scratch(groups * 60, self)  # three pointers, three strides and three sizes
    workspace = scratch(device.gpu.sm_count * 512, self)  # four tensor maps for each SM
    del workspace, arguments
    return out


def _length(offs: torch.Tensor | None) -> int:
    assert offs is not None, "two matrices are grouped by offsets"
    return offs.shape[0]


def _grouped_output(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the output with rows aligned to 16 bytes."""
    columns = b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() == b.dim():
        groups = a.shape[0] if a.dim() == 3 else _length(offs)
        shape, strides = (groups, a.shape[-2], columns), (a.shape[-2] * padded, padded, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)
    return torch.empty_strided((a.shape[-2], columns), (padded, 1), dtype=dtype, device=a.device)

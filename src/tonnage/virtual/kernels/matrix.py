"""Matrix products: copies of operands that cuBLAS cannot read, and the workspaces of cuBLASLt.

The workspace of cuBLAS itself is taken by the generic kernel (`LIBRARIES` in the package); values are not computed here.
"""

from typing import Any

import torch

from tonnage.virtual.kernels.registry import kernel, plain, scratch

_ATEN = torch.ops.aten
_LT_TYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


def _copies(*operands: torch.Tensor) -> None:
    """What the library needs in another layout, copied, all at once."""
    held = [operand.clone(memory_format=torch.contiguous_format) for operand in operands]
    while held:
        held.pop()


def _unreadable(matrix: torch.Tensor) -> bool:
    """Neither its rows nor its columns lie one after the other."""
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    if (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows)):
        return False
    return not _is_dense(matrix)


def _is_dense(matrix: torch.Tensor) -> bool:
    """No gaps and no overlaps, in whatever order; a dimension of one may have any stride."""
    expected = 1
    for step, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _unreadable_batch(batch: torch.Tensor) -> bool:
    """The same for a batch of matrices, of which only the last two dimensions count; a stride of 0 is no leading one."""
    (_, rows, columns), (_, row_step, column_step) = batch.shape, batch.stride()
    if (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows)):
        return False
    return not (batch.is_contiguous() and row_step != 0 and column_step != 0)


def _multiply(operator: Any) -> Any:
    compute = plain(operator)

    def mm(self: torch.Tensor, mat2: torch.Tensor, **out: Any) -> torch.Tensor:
        result: torch.Tensor = compute(self, mat2, **out)
        if _unreadable(self) or _unreadable(mat2):
            _copies(*(m for m in (mat2, self) if _unreadable(m)))
        return result

    return mm


kernel("mm")(_multiply(_ATEN.mm.default))
kernel("mm.out")(_multiply(_ATEN.mm.out))


def _takes_lt(bias: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, beta: Any, out: torch.Tensor) -> bool:
    """A bias that is a vector goes through cuBLASLt, which adds it in the same kernel."""
    return (
        bias.dim() == 1
        and beta == 1
        and bias.dtype in _LT_TYPES
        and bias.shape[0] == mat2.shape[1]
        and bias.is_contiguous()
        and out.is_contiguous()
        and mat2.shape[0] > 1
        and mat2.shape[1] > 1
    )


def _multiply_add(operator: Any) -> Any:
    compute = plain(operator)

    def addmm(
        self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, **others: Any
    ) -> torch.Tensor:
        result: torch.Tensor = compute(self, mat1, mat2, beta=beta, alpha=alpha, **others)
        if _unreadable(mat1) or _unreadable(mat2):
            _copies(*(m for m in (mat2, mat1) if _unreadable(m)))
        if mat1.numel() and mat2.numel() and _takes_lt(self, mat1, mat2, beta, result):
            _use_lt()
        return result

    return addmm


kernel("addmm")(_multiply_add(_ATEN.addmm.default))
kernel("addmm.out")(_multiply_add(_ATEN.addmm.out))
kernel("addmm_")(_multiply_add(_ATEN.addmm_.default))
kernel("_addmm_activation")(_multiply_add(_ATEN._addmm_activation.default))
kernel("_addmm_activation.out")(_multiply_add(_ATEN._addmm_activation.out))


def _use_lt() -> None:
    from tonnage.virtual.session import active

    active().workspaces.use("cublaslt")


def _through_lt(operator: Any, since: tuple[int, int] = (2, 0)) -> Any:
    """A product in cuBLASLt, which has a workspace since this version."""
    compute = plain(operator)

    def multiply(*operands: Any, **others: Any) -> torch.Tensor:
        from tonnage.virtual.session import active

        result: torch.Tensor = compute(*operands, **others)
        if active().device.torch_version >= since:
            _use_lt()
        return result

    return multiply


kernel("_int_mm")(_through_lt(_ATEN._int_mm.default, since=(2, 9)))
kernel("_int_mm.out")(_through_lt(_ATEN._int_mm.out, since=(2, 9)))
kernel("_scaled_mm")(_through_lt(_ATEN._scaled_mm.default))
kernel("_scaled_mm.out")(_through_lt(_ATEN._scaled_mm.out))


def _multiply_batch(operator: Any) -> Any:
    compute = plain(operator)

    def bmm(self: torch.Tensor, mat2: torch.Tensor, **out: Any) -> torch.Tensor:
        result: torch.Tensor = compute(self, mat2, **out)
        if _unreadable_batch(self) or _unreadable_batch(mat2):
            _copies(*(m for m in (mat2, self) if _unreadable_batch(m)))
        return result

    return bmm


kernel("bmm")(_multiply_batch(_ATEN.bmm.default))
kernel("bmm.out")(_multiply_batch(_ATEN.bmm.out))


def _multiply_add_batch(operator: Any) -> Any:
    compute = plain(operator)

    def baddbmm(self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **others: Any) -> torch.Tensor:
        result: torch.Tensor = compute(self, batch1, batch2, **others)
        if _unreadable_batch(batch1) or _unreadable_batch(batch2):
            _copies(*(m for m in (batch2, batch1) if _unreadable_batch(m)))
        return result

    return baddbmm


kernel("baddbmm")(_multiply_add_batch(_ATEN.baddbmm.default))
kernel("baddbmm.out")(_multiply_add_batch(_ATEN.baddbmm.out))
kernel("baddbmm_")(_multiply_add_batch(_ATEN.baddbmm_.default))


def _multiply_vector(operator: Any) -> Any:
    compute = plain(operator)

    def addmv(self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, **others: Any) -> torch.Tensor:
        result: torch.Tensor = compute(self, mat, vec, **others)
        if _unreadable_for_vectors(mat):
            _copies(mat)
        return result

    return addmv


def _unreadable_for_vectors(matrix: torch.Tensor) -> bool:
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    by_column = row_step == 1 and column_step >= max(1, rows)
    by_row = column_step == 1 and row_step >= max(1, columns)
    return matrix.numel() > 0 and not (by_column or by_row)


kernel("addmv")(_multiply_vector(_ATEN.addmv.default))
kernel("addmv.out")(_multiply_vector(_ATEN.addmv.out))
kernel("addmv_")(_multiply_vector(_ATEN.addmv_.default))


# Many products of different sizes at once


@kernel("_grouped_mm")
def grouped_mm(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """On Hopper and Blackwell one CUTLASS kernel for bfloat16, with its arguments in memory; else one product a group."""
    from tonnage.virtual.session import active

    out = _grouped_output(self, mat2, offs, out_dtype or self.dtype)
    device = active().device
    fused = device.gpu.compute_capability[0] in (9, 10) and self.dtype == torch.bfloat16
    if not fused:
        active().workspaces.use("cublas")
        return out
    groups = mat2.shape[0] if mat2.dim() == 3 else self.shape[0] if self.dim() == 3 else _length(offs)
    arguments = scratch(groups * 60, self)  # three pointers, three strides and three sizes
    workspace = scratch(device.gpu.sm_count * 512, self)  # four tensor maps for each multiprocessor
    del workspace, arguments
    return out


def _length(offs: torch.Tensor | None) -> int:
    assert offs is not None, "two matrices are grouped by offsets"
    return offs.shape[0]


def _grouped_output(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows begin at 16 bytes."""
    columns = b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() == b.dim():
        groups = a.shape[0] if a.dim() == 3 else _length(offs)
        shape, strides = (groups, a.shape[-2], columns), (a.shape[-2] * padded, padded, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)
    return torch.empty_strided((a.shape[-2], columns), (padded, 1), dtype=dtype, device=a.device)

"""Matrix products, factorizations and solves: copies of operands that the libraries cannot read, pivots, workspaces.

The workspace of cuBLAS itself is taken by the generic kernel (`LIBRARIES` in the package); `library_sizes` has those of
cuSOLVER. Values are not computed here.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels import library_sizes as sizes
from tonnage.virtual.kernels.registry import after_outputs, free_reversed, is_dense, kernel, plain, scratch
from tonnage.virtual.session import active

Tensors = tuple[Any, ...]

_LT_TYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


def _is_readable(matrix: Tensor) -> bool:
    """Whether rows or columns of the matrices are contiguous; a stride of 0 is not a leading dimension."""
    (rows, columns), (row_step, column_step) = matrix.shape[-2:], matrix.stride()[-2:]
    return (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows))


def _register(
    names: str, takes: Callable[[Tensor], bool], first: int = 0, last: int = 1, may_take_lt: bool = False
) -> None:
    """Register products of the arguments from `first` to `last`; `takes` says which readable ones cuBLAS takes too."""

    @after_outputs(*names.split())
    def multiply(result: Tensor, *given: Any, **others: Any) -> None:
        # Operands that the library needs in another layout are copied, all at once.
        operands = given[last : first - 1 if first else None : -1]
        copied = [each for each in operands if not (_is_readable(each) or takes(each))]
        free_reversed([each.clone(memory_format=torch.contiguous_format) for each in copied])
        if may_take_lt and _takes_lt(given[0], given[1], given[2], others.get("beta", 1), result):
            active().workspaces.use("cublaslt")


def _takes_lt(bias: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, out: Tensor) -> bool:
    """Whether cuBLASLt is used, which adds a vector bias in the same kernel."""
    return (
        mat1.numel() > 0
        and min(mat2.shape) > 1
        and beta == 1
        and bias.dtype in _LT_TYPES
        and bias.shape == mat2.shape[1:]
        and bias.is_contiguous()
        and out.is_contiguous()
    )


def _is_batch_readable(batch: Tensor) -> bool:
    return batch.is_contiguous() and 0 not in batch.stride()[1:]


_register("mm mm.out", is_dense)
_register("addmm addmm.out addmm_ _addmm_activation _addmm_activation.out", is_dense, 1, 2, may_take_lt=True)
_register("bmm bmm.out", _is_batch_readable)
_register("baddbmm baddbmm.out baddbmm_", _is_batch_readable, 1, 2)
_register("addmv addmv.out addmv_", lambda matrix: not matrix.numel(), 1, 1)


@after_outputs("_int_mm", "_int_mm.out")
def int_mm(*_: Any, **__: Any) -> None:
    if active().device.torch_version >= (2, 9):
        active().workspaces.use("cublaslt")


@after_outputs("_scaled_mm", "_scaled_mm.out")
def scaled_mm(*_: Any, **__: Any) -> None:
    active().workspaces.use("cublaslt")


@kernel("_grouped_mm")
def grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Use one CUTLASS kernel for bfloat16 on Hopper and Blackwell, else one product per group."""
    if mat2.dim() == 3 or self.dim() == 3:
        groups = mat2.shape[0] if mat2.dim() == 3 else self.shape[0]
    else:
        assert offs is not None, "two matrices are grouped by offsets"
        groups = offs.shape[0]
    # Rows of the output are aligned to 16 bytes.
    dtype, (rows, columns) = out_dtype or self.dtype, (self.shape[-2], mat2.shape[-1])
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    shape, strides = (rows, columns), (padded, 1)
    if self.dim() == mat2.dim():
        shape, strides = (groups, *shape), (rows * padded, *strides)  # type: ignore[assignment]
    out = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
    gpu = active().device.gpu
    if gpu.compute_capability[0] not in (9, 10) or self.dtype != torch.bfloat16:
        active().workspaces.use("cublas")
        return out
    arguments = scratch(groups * 60, self)  # three pointers, three strides and three sizes
    scratch(gpu.sm_count * 512, self)  # four tensor maps for each SM
    del arguments
    return out


def _batch(matrix: Tensor) -> int:
    return prod(matrix.shape[:-2])


def _info(like: Tensor) -> Tensor:
    return torch.empty(like.shape[:-2], dtype=torch.int32, device=like.device)


def _longs(count: int, like: Tensor, tensors: int) -> list[Tensor]:
    return [torch.empty(count, dtype=torch.int64, device=like.device) for _ in range(tensors)]


@after_outputs("linalg_cholesky_ex")
def linalg_cholesky_ex(result: Any, self: Any, **_: bool) -> None:
    scratch(_batch(self) * 8 if _batch(self) > 1 else sizes.potrf_bytes(self.shape[-1]), self)


@after_outputs("cholesky_inverse")
def cholesky_inverse(result: Any, self: Any, upper: bool = False) -> list[Any]:
    return [scratch(self.numel() * self.element_size(), self)]


@kernel("_cholesky_solve_helper")
def cholesky_solve_helper(self: Any, A: Any, upper: bool) -> Tensor:
    info = _info(A) if _batch(A) == 1 else None
    result: Tensor = plain("_cholesky_solve_helper")(self, A, upper)
    scratch(A.numel() * A.element_size(), A)
    del info
    return result


def _factor(matrix: Any) -> None:
    """Use cuSOLVER for one matrix; allocate pointers for a batch of small ones."""
    batch, n = _batch(matrix), max(matrix.shape[-2:])
    scratch(sizes.getrf_bytes(n) if batch <= 1 else batch * 8 if n <= 16 else 0, matrix)


def _substitute(matrix: Any, columns: int) -> None:
    """Solve with the factors: small systems in place, larger ones on a permuted copy of the right side."""
    batch, n = _batch(matrix), matrix.shape[-1]
    if n < 32 or (batch == 1 and (n * columns <= 160 or (columns == 1 and n <= 100))):
        scratch(batch * 8, matrix)
        return
    permutations = _longs(batch * n, matrix, 3 if batch == 1 else 2)
    scratch(batch * n * columns * matrix.element_size(), matrix)
    permutations.clear()


@after_outputs("linalg_lu_factor_ex")
def linalg_lu_factor_ex(result: Any, A: Any, **_: bool) -> None:
    _factor(A)


@after_outputs("linalg_lu")
def linalg_lu(result: Any, A: Any, **_: bool) -> list[Any]:
    factors = torch.empty_like(A)
    pivots = torch.empty(*A.shape[:-2], min(A.shape[-2:]), dtype=torch.int32, device=A.device)
    info = _info(A)
    _factor(A)
    return [pivots, info, factors]


@after_outputs("linalg_inv_ex")
def linalg_inv_ex(result: Any, A: Any, **_: bool) -> list[Any]:
    factors = torch.empty_like(A)
    pivots = torch.empty(A.shape[:-1], dtype=torch.int32, device=A.device)
    _factor(A)
    _substitute(A, A.shape[-1])
    return [factors, pivots]


@after_outputs("_linalg_det", "_linalg_slogdet")
def determinant(result: Any, A: Any) -> list[Any]:
    info = _info(A)
    _factor(A)
    return [info]


@after_outputs("_linalg_solve_ex")
def linalg_solve_ex(result: Any, A: Any, B: Any, **_: bool) -> None:
    _factor(A)
    _substitute(A, result[0].numel() // max(1, _batch(A) * A.shape[-1]))


@after_outputs("linalg_lu_solve")
def linalg_lu_solve(result: Any, LU: Any, pivots: Any, B: Any, **_: bool) -> None:
    _substitute(LU, B.shape[-1])


@after_outputs("linalg_solve_triangular")
def linalg_solve_triangular(result: Any, self: Any, B: Any, **_: bool) -> list[Any]:
    return _longs(_batch(self), self, 2) if self.shape[-1] <= 64 else []


def _reflect(matrix: Any) -> None:
    batch, (rows, columns) = _batch(matrix), matrix.shape[-2:]
    if batch > 1 and max(rows, columns) <= 64:
        free_reversed(_longs(batch, matrix, 2))
    else:
        _repeat(sizes.householder_bytes(min(rows, columns), matrix.element_size()), matrix)


def _assemble(matrix: Any) -> None:
    rows, columns = matrix.shape[-2:]
    _repeat(sizes.orgqr_bytes(rows, min(rows, columns), matrix.element_size()), matrix)


def _repeat(size_bytes: int, matrix: Any) -> None:
    """Allocate the status of a routine, and its workspace for each matrix."""
    info = torch.empty(1, dtype=torch.int32, device=matrix.device)
    for _ in range(_batch(matrix)):
        scratch(size_bytes, matrix)
    del info


@after_outputs("linalg_qr")
def linalg_qr(result: Any, A: Any, mode: str = "reduced") -> list[Any]:
    if not A.numel():
        return []
    scales = torch.empty(*A.shape[:-2], min(A.shape[-2:]), dtype=A.dtype, device=A.device)
    _reflect(A)
    if mode != "r":
        _assemble(A)
    return [scales]


@after_outputs("linalg_householder_product")
def linalg_householder_product(result: Any, input: Any, tau: Any) -> None:
    _assemble(input)


@kernel("linalg_lstsq.out")
def linalg_lstsq_out(
    self: Any, b: Any, rcond: float | None = None, *, driver: str | None = None, solution: Any, residuals: Any, rank: Any,
    singular_values: Any,
) -> Tensors:  # fmt: skip
    """Solve by Householder reflections of a copy."""
    vector = b.dim() == 1 or (b.dim() == self.dim() - 1 and b.shape == self.shape[:-1])
    columns = [] if vector else [b.shape[-1]]
    info = _info(self)
    rows, width = self.shape[-2:]
    solution.resize_((*self.shape[:-2], width, *columns))
    copy = torch.empty_like(self)
    _reflect(self)
    for _ in range(_batch(self)):
        scratch(sizes.ormqr_bytes(rows, prod(columns), width, self.element_size()), self)
    del copy
    torch.empty((), dtype=torch.bool, device=info.device)  # the flag of PyTorch's check for failures
    return solution, residuals, rank, singular_values


@kernel("_linalg_eigh")
def linalg_eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> Tensors:
    """Use a batched routine for small matrices, Jacobi for float32 from 32 to 512, else syevd."""
    batch, n, item = _batch(A), A.shape[-1], A.element_size()
    vectors = torch.empty_like(A, memory_format=torch.contiguous_format).mT
    values = torch.empty(A.shape[:-1], dtype=A.dtype.to_real(), device=A.device)
    info = _info(A)
    if n <= 32 and batch > 1:
        scratch(sizes.syev_batched_bytes(n, batch, item), A)
    else:
        for _ in range(batch):
            scratch(sizes.syevj_bytes(n, item) if item == 4 and 32 <= n <= 512 else sizes.syevd_bytes(n, item), A)
    torch.empty((), dtype=torch.bool, device=info.device)  # the flag, see above
    del info
    return values, vectors if compute_v else vectors.new_empty(0)


@kernel("_linalg_svd")
def linalg_svd(A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Tensors:
    (rows, columns), front = A.shape[-2:], A.shape[:-2]
    k = min(rows, columns)
    u = torch.empty(*front, rows if full_matrices else k, rows, dtype=A.dtype, device=A.device).mT
    vh = torch.empty(*front, columns if full_matrices else k, columns, dtype=A.dtype, device=A.device)
    values = torch.empty(*front, k, dtype=A.dtype.to_real(), device=A.device)
    info = _info(A)
    copy = torch.empty_like(A)
    scratch(sizes.singular_bytes(rows, columns, A.element_size()), A)
    del copy
    torch.empty((), dtype=torch.bool, device=info.device)  # the flag, see above
    del info
    return (u, values, vh) if compute_uv else (u.new_empty(0), values, vh.new_empty(0))


@kernel("linalg_matrix_exp")
def linalg_matrix_exp(self: Any) -> Tensor:
    """Evaluate a Taylor polynomial of the matrix and its powers: at most thirteen matrices at a time."""
    scratch(13 * self.numel() * self.element_size(), self)
    result: Tensor = plain("linalg_matrix_exp")(self)
    return result

"""Factorizations and solves (cuSOLVER, cuBLAS, MAGMA): copies, pivots and workspaces in addition to the outputs.

`library_sizes` has the workspaces of the closed libraries.
"""

from math import prod
from typing import Any

import torch

from tonnage.virtual.kernels import library_sizes as sizes
from tonnage.virtual.kernels.registry import kernel, plain, scratch

Tensors = tuple[Any, ...]


def _batch(matrix: torch.Tensor) -> int:
    return prod(matrix.shape[:-2])


def _borrow(size_bytes: int, like: torch.Tensor) -> None:
    area = scratch(size_bytes, like)
    del area


def _info(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape[:-2], dtype=torch.int32, device=like.device)


def _check(info: torch.Tensor) -> None:
    """Allocate the flag for PyTorch's check of failed factorizations; none fails here."""
    flag = torch.empty((), dtype=torch.bool, device=info.device)
    del flag


# Cholesky


@kernel("linalg_cholesky_ex")
def linalg_cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> Tensors:
    outputs = tuple(plain("linalg_cholesky_ex")(self, upper=upper, check_errors=False))
    batch, n = _batch(self), self.shape[-1]
    _borrow(batch * 8 if batch > 1 else sizes.potrf_bytes(n), self)
    return outputs


@kernel("cholesky_inverse")
def cholesky_inverse(self: Any, upper: bool = False) -> torch.Tensor:
    result: torch.Tensor = plain("cholesky_inverse")(self, upper)
    _borrow(self.numel() * self.element_size(), self)
    return result


@kernel("_cholesky_solve_helper")
def cholesky_solve_helper(self: Any, A: Any, upper: bool) -> torch.Tensor:
    info = _info(A) if _batch(A) == 1 else None
    result: torch.Tensor = plain("_cholesky_solve_helper")(self, A, upper)
    _borrow(A.numel() * A.element_size(), A)
    del info
    return result


# LU


def _factor(matrix: Any) -> None:
    """Use cuSOLVER for one matrix; allocate pointers for a batch of small ones."""
    batch, n = _batch(matrix), max(matrix.shape[-2:])
    if batch > 1:
        _borrow(batch * 8 if n <= 16 else 0, matrix)
    else:
        _borrow(sizes.getrf_bytes(n), matrix)


def _substitute(matrix: Any, columns: int) -> None:
    """Solve with the factors: small systems in place, larger ones on a permuted copy of the right side."""
    batch, n = _batch(matrix), matrix.shape[-1]
    if n < 32 or (batch == 1 and (n * columns <= 160 or (columns == 1 and n <= 100))):
        _borrow(batch * 8, matrix)
        return
    permutations = [
        torch.empty(batch * n, dtype=torch.int64, device=matrix.device) for _ in range(3 if batch == 1 else 2)
    ]
    _borrow(batch * n * columns * matrix.element_size(), matrix)
    permutations.clear()


@kernel("linalg_lu_factor_ex")
def linalg_lu_factor_ex(A: Any, *, pivot: bool = True, check_errors: bool = False) -> Tensors:
    outputs = tuple(plain("linalg_lu_factor_ex")(A, pivot=pivot, check_errors=False))
    _factor(A)
    return outputs


@kernel("linalg_lu")
def linalg_lu(A: Any, *, pivot: bool = True) -> Tensors:
    outputs = tuple(plain("linalg_lu")(A, pivot=pivot))
    factors = torch.empty_like(A)
    pivots = torch.empty(*A.shape[:-2], min(A.shape[-2:]), dtype=torch.int32, device=A.device)
    info = _info(A)
    _factor(A)
    del factors, info, pivots
    return outputs


@kernel("linalg_inv_ex")
def linalg_inv_ex(A: Any, *, check_errors: bool = False) -> Tensors:
    outputs = tuple(plain("linalg_inv_ex")(A, check_errors=False))
    factors = torch.empty_like(A)
    pivots = torch.empty(A.shape[:-1], dtype=torch.int32, device=A.device)
    _factor(A)
    _substitute(A, A.shape[-1])
    del pivots, factors
    return outputs


def _register_determinant(name: str) -> None:
    by_shape = plain(name)

    @kernel(name)
    def determinant(A: Any) -> Tensors:
        outputs = tuple(by_shape(A))
        info = _info(A)
        _factor(A)
        del info
        return outputs


_register_determinant("_linalg_det")
_register_determinant("_linalg_slogdet")


@kernel("_linalg_solve_ex")
def linalg_solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Tensors:
    outputs = tuple(plain("_linalg_solve_ex")(A, B, left=left, check_errors=False))
    _factor(A)
    _substitute(A, outputs[0].numel() // max(1, _batch(A) * A.shape[-1]))
    return outputs


@kernel("linalg_lu_solve")
def linalg_lu_solve(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> torch.Tensor:
    result: torch.Tensor = plain("linalg_lu_solve")(LU, pivots, B, left=left, adjoint=adjoint)
    _substitute(LU, B.shape[-1])
    return result


@kernel("linalg_solve_triangular")
def linalg_solve_triangular(
    self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    result: torch.Tensor = plain("linalg_solve_triangular")(
        self, B, upper=upper, left=left, unitriangular=unitriangular
    )
    if self.shape[-1] <= 64:
        matrices, sides = (torch.empty(_batch(self), dtype=torch.int64, device=self.device) for _ in range(2))
        del sides, matrices
    return result


# Orthogonal factors


def _reflect(matrix: Any) -> None:
    batch, (rows, columns) = _batch(matrix), matrix.shape[-2:]
    if batch > 1 and max(rows, columns) <= 64:
        first, second = (torch.empty(batch, dtype=torch.int64, device=matrix.device) for _ in range(2))
        del second, first
        return
    info = torch.empty(1, dtype=torch.int32, device=matrix.device)
    for _ in range(batch):
        _borrow(sizes.householder_bytes(min(rows, columns), matrix.element_size()), matrix)
    del info


def _assemble(matrix: Any) -> None:
    batch, (rows, columns) = _batch(matrix), matrix.shape[-2:]
    info = torch.empty(1, dtype=torch.int32, device=matrix.device)
    for _ in range(batch):
        _borrow(sizes.orgqr_bytes(rows, min(rows, columns), matrix.element_size()), matrix)
    del info


@kernel("linalg_qr")
def linalg_qr(A: Any, mode: str = "reduced") -> Tensors:
    outputs = tuple(plain("linalg_qr")(A, mode))
    if A.numel():
        scales = torch.empty(*A.shape[:-2], min(A.shape[-2:]), dtype=A.dtype, device=A.device)
        _reflect(A)
        if mode != "r":
            _assemble(A)
        del scales
    return outputs


@kernel("linalg_householder_product")
def linalg_householder_product(input: Any, tau: Any) -> torch.Tensor:
    result: torch.Tensor = plain("linalg_householder_product")(input, tau)
    _assemble(input)
    return result


@kernel("linalg_lstsq.out")
def linalg_lstsq_out(
    self: Any, b: Any, rcond: float | None = None, *, driver: str | None = None, solution: Any, residuals: Any, rank: Any,
    singular_values: Any,
) -> Tensors:  # fmt: skip
    """Solve by Householder reflections of a copy."""
    vector = b.dim() == 1 or (b.dim() == self.dim() - 1 and b.shape == self.shape[:-1])
    columns = 1 if vector else b.shape[-1]
    info = _info(self)
    shape = (*self.shape[:-2], self.shape[-1]) if vector else (*self.shape[:-2], self.shape[-1], columns)
    solution.resize_(shape)
    copy = torch.empty_like(self)
    _reflect(self)
    rows, width = self.shape[-2:]
    for _ in range(_batch(self)):
        _borrow(sizes.ormqr_bytes(rows, columns, width, self.element_size()), self)
    del copy
    _check(info)
    return solution, residuals, rank, singular_values


# Eigenvalues and singular values


def eigen_bytes(n: int, batch: int, item: int) -> int:
    """Return the workspace of eigh as PyTorch chooses: batched if small, Jacobi for float32 from 32 to 512, else syevd."""
    if n <= 32 and batch > 1:
        return sizes.syev_batched_bytes(n, batch, item)
    return sizes.syevj_bytes(n, item) if item == 4 and 32 <= n <= 512 else sizes.syevd_bytes(n, item)


@kernel("_linalg_eigh")
def linalg_eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> Tensors:
    batch, n = _batch(A), A.shape[-1]
    vectors = torch.empty_like(A, memory_format=torch.contiguous_format).mT
    values = torch.empty(A.shape[:-1], dtype=_real(A.dtype), device=A.device)
    info = _info(A)
    alone = n <= 32 and batch > 1
    for _ in range(1 if alone else batch):
        _borrow(eigen_bytes(n, batch, A.element_size()), A)
    _check(info)
    del info
    return values, vectors if compute_v else vectors.new_empty(0)


@kernel("_linalg_svd")
def linalg_svd(A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Tensors:
    (rows, columns), front = A.shape[-2:], A.shape[:-2]
    k = min(rows, columns)
    u_shape = (*front, rows, rows if full_matrices else k)
    v_shape = (*front, columns if full_matrices else k, columns)
    u = torch.empty(*front, u_shape[-1], rows, dtype=A.dtype, device=A.device).mT
    vh = torch.empty(v_shape, dtype=A.dtype, device=A.device)
    values = torch.empty(*front, k, dtype=_real(A.dtype), device=A.device)
    info = _info(A)
    copy = torch.empty_like(A)
    _borrow(sizes.singular_bytes(rows, columns, A.element_size()), A)
    del copy
    _check(info)
    del info
    if not compute_uv:
        return u.new_empty(0), values, vh.new_empty(0)
    return u, values, vh


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


@kernel("linalg_matrix_exp")
def linalg_matrix_exp(self: Any) -> torch.Tensor:
    """Evaluate a Taylor polynomial of the matrix and its powers: at most thirteen matrices at a time."""
    size = self.numel() * self.element_size()
    _borrow(13 * size, self)
    result: torch.Tensor = plain("linalg_matrix_exp")(self)
    return result

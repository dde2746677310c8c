"""torch.linalg: cuSOLVER, MAGMA and cuBLAS paths, small and medium, single and batched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .spec import Case, case, t

L = torch.linalg
SHAPES = ((3, 3), (32, 32), (100, 100), (512, 512), (1500, 1500), (4, 16, 16), (64, 32, 32), (8, 200, 200), (1024, 4, 4))
SQUARE: dict[str, Any] = {
    "cholesky": L.cholesky, "inv": L.inv, "eigh": L.eigh, "eigvalsh": L.eigvalsh, "det": L.det, "slogdet": L.slogdet, "logdet": torch.logdet, "matrix_exp": torch.matrix_exp,
    "qr": L.qr, "svd": lambda x: L.svd(x, full_matrices=False), "svd full": L.svd, "svdvals": L.svdvals, "pinv": L.pinv, "matrix_norm": L.matrix_norm,
    "matrix_norm nuc": lambda x: L.matrix_norm(x, "nuc"), "matrix_norm 2": lambda x: L.matrix_norm(x, 2), "lu": L.lu, "lu_factor": L.lu_factor, "matrix_power": lambda x: L.matrix_power(x, 3),
    "cholesky_ex": L.cholesky_ex, "inv_ex": L.inv_ex, "cholesky_inverse": torch.cholesky_inverse, "matrix_rank": L.matrix_rank, "cond": L.cond, "geqrf": lambda x: torch.geqrf(x.detach()),
}  # fmt: skip


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for name, call in SQUARE.items():
            if shape[-1] > 1000 and name in ("svd full", "matrix_norm nuc", "matrix_norm 2", "cond", "matrix_rank", "pinv"):
                continue
            yield case(f"linalg.{name}", call, t(*shape, fill="spd"), backward=shape[-1] <= 512)
        rhs = t(*shape[:-1], 5)
        yield case("linalg.solve", L.solve, t(*shape, fill="spd"), rhs)
        yield case("linalg.solve", L.solve, t(*shape, fill="spd"), t(*shape[:-1]), note="vector")
        yield case("linalg.solve_triangular", lambda a, b: L.solve_triangular(a, b, upper=True), t(*shape, fill="spd"), rhs)
        yield case("cholesky_solve", torch.cholesky_solve, rhs, t(*shape, fill="spd"))
        yield case("linalg.lstsq", lambda a, b: L.lstsq(a, b).solution, t(*shape, fill="spd"), rhs)
        if shape[-1] <= 100:
            yield case("linalg.eig", L.eig, t(*shape, fill="spd"), backward=False)
    for shape in ((100, 30), (30, 100), (4, 50, 20), (1000, 200), (3000, 3)):
        yield case("linalg.qr", L.qr, t(*shape))
        yield case("linalg.svd", lambda x: L.svd(x, full_matrices=False), t(*shape))
        yield case("linalg.pinv", L.pinv, t(*shape))
        yield case("svd_lowrank", lambda x: torch.svd_lowrank(x, 3), t(*shape, grad=False))
        yield case("pca_lowrank", lambda x: torch.pca_lowrank(x, 3), t(*shape, grad=False))
        yield case("linalg.lstsq", lambda a, b: L.lstsq(a, b).solution, t(*shape), t(*shape[:-1], 2))
        yield case("linalg.norm", L.norm, t(*shape))
        yield case("cov", torch.cov, t(*shape[-2:]))
        yield case("corrcoef", torch.corrcoef, t(*shape[-2:]))
    for dtype in (torch.float64, torch.complex64):
        for name in ("cholesky", "inv", "eigh", "qr", "svd", "det"):
            yield case(f"linalg.{name}", SQUARE[name], t(64, 64, dtype=dtype, fill="spd"))

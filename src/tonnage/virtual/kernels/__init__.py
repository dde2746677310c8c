"""CUDA operators whose host code allocates more than its outputs, one family per file; see `registry` for the form."""

from importlib import import_module
from pkgutil import iter_modules

# Operators that use a library with its own workspace, by aten name.
LIBRARIES = {
    "mm": "cublas", "bmm": "cublas", "addmm": "cublas", "baddbmm": "cublas", "addmv": "cublas", "addbmm": "cublas",
    "dot": "cublas", "vdot": "cublas", "mv": "cublas", "_int_mm": "cublas", "_scaled_mm": "cublas",
    "_addmm_activation": "cublas", "linalg_solve_triangular": "cublas",
}  # fmt: skip


def load_all() -> None:
    """Import every family, so that its kernels are registered."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")

"""CUDA operators whose host code allocates more than its outputs, one family per file; see `registry` for the form."""

# Operators that use a library with its own workspace, by aten name.
LIBRARIES = {
    "mm": "cublas", "bmm": "cublas", "addmm": "cublas", "baddbmm": "cublas", "addmv": "cublas", "addbmm": "cublas",
    "dot": "cublas", "vdot": "cublas", "mv": "cublas", "_int_mm": "cublas", "_scaled_mm": "cublas",
    "_addmm_activation": "cublas", "linalg_solve_triangular": "cublas",
}  # fmt: skip

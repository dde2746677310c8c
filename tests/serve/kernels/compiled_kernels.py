"""Every kernel compiled for a Hopper card, which needs none: what a launch would pass is caught, and compiled instead.

The interpreter takes what the compiler does not, and knows no shared memory. Run by test_interpreted.py, without interpreting.
"""

import sys
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve.kernels.pages import paged
from tonnage.fit.layers.cross_entropy_kernel import losses_and_gradient_
from tonnage.serve.kernels.chunks import attend_chunks_triton
from tonnage.serve.kernels.decode import attend_decode_triton
from tonnage.serve.kernels.logit_threshold import logit_threshold_triton
from tonnage.serve.kernels.matmul8 import matmul8_triton
from tonnage.serve.kernels.norm import add_norm_triton, gelu_tanh_mul_triton, silu_mul_triton
from tonnage.serve.kernels.sample import sample_triton
from tonnage.serve.kernels.store import store_triton

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SHARED_MEMORY_BYTES = 227 * 1024  # of one program on a Hopper card


class Compiler:
    """In the place of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shared_bytes: list[int] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *given: Any, **options: Any) -> None:
        how = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
        tensors = {
            name: isinstance(each, torch.Tensor) for name, each in zip(self.kernel.arg_names, given, strict=False)
        }
        signature = {
            name: TYPES[each.dtype] if tensors[name] else "i32"
            for name, each in zip(self.kernel.arg_names, given, strict=False)
        } | dict.fromkeys(options, "constexpr")
        aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(tensors) if tensors[name]}
        source = ASTSource(self.kernel, signature, options, aligned)
        self.shared_bytes.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=how).metadata.shared)


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(("tonnage.serve.kernels.", "tonnage.fit.layers.")):
            for attribute in [each for each in vars(module) if each.endswith("_kernel")]:
                found.append(Compiler(getattr(module, attribute)))
                monkeypatch.setattr(module, attribute, found[-1])
    yield
    used = [size for compiler in found for size in compiler.shared_bytes]
    assert used and max(used) <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "soft_cap"),
    [(16, 8, 128, 0, 0.0), (5, 1, 80, 99, 5.0), (4, 2, 256, 0, 5.0)],
)
def test_attention(heads: int, kv_heads: int, head_dim: int, window: int, soft_cap: float, fp8: bool) -> None:
    cache = paged([20, 9], kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, fp8=fp8)
    query = torch.zeros(2, heads, head_dim, dtype=torch.bfloat16)
    where = (query, cache.layer, cache.tables, cache.lengths)
    options: dict[str, Any] = {"scale": 0.1, "window": window, "soft_cap": soft_cap}
    attend_decode_triton(*where, **options, splits=1, order=torch.tensor([0, 1], dtype=torch.int32))
    attend_decode_triton(*where, **options, splits=8)
    attend_chunks_triton(*where, torch.tensor([0, 1, 2], dtype=torch.int32), 1, **options)


@pytest.mark.parametrize("fp8", [False, True])
def test_store(fp8: bool) -> None:
    cache = paged([20], kv_heads=2, head_dim=96, dtype=torch.bfloat16, fp8=fp8)
    rows, norm, angles = torch.zeros(1, 2, 96).bfloat16(), torch.ones(96).bfloat16(), torch.ones(9, 32)
    at = torch.zeros(1, dtype=torch.int64)
    store_triton(rows, rows, rows, at, at, cache.layer, cos=angles, sin=angles, query_norm=norm, key_norm=norm)


def test_rows() -> None:
    rows = torch.zeros(3, 5120, dtype=torch.bfloat16)
    add_norm_triton(rows, rows, rows[0], 1e-6)
    silu_mul_triton(rows)
    gelu_tanh_mul_triton(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draw(dtype: torch.dtype) -> None:
    numbers = torch.zeros(1, dtype=torch.int64)
    sample_triton(torch.zeros(1, 5000, dtype=dtype), torch.ones(1), numbers, numbers)


def test_least() -> None:
    logit_threshold_triton(torch.zeros(2, 5000), *torch.ones(4, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 256])
def test_matmul8(rows: int, dtype: torch.dtype) -> None:
    matmul8_triton(torch.zeros(rows, 1024).bfloat16(), torch.zeros(4500, 1024).to(dtype), torch.ones(4500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(dtype: torch.dtype) -> None:
    rows = torch.ones(2, 1)
    losses_and_gradient_(
        torch.zeros(2, 5008, dtype=dtype), torch.zeros(2, 1, dtype=torch.int64), rows, rows, rows, 5001
    )

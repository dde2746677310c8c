"""Matrix products, factorisations and solves against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tonnage.virtual.kernels.library_sizes import householder_bytes, singular_bytes, syevd_bytes, syevj_bytes

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_the_first_product_with_a_bias_takes_both_workspaces(events: Events) -> None:
    inputs = _empty(64), _empty(32, 48), _empty(48, 64)
    assert events(lambda: torch.addmm(*inputs)) == "+8192 +33554432 +1048576"
    assert events(lambda: torch.addmm(*inputs)) == "+8192"


def test_rows_that_are_not_dense_are_copied(events: Events) -> None:
    assert events(lambda: _empty(96, 256)[:, ::2] @ _empty(128, 64)) == "+98304 +32768 +24576 +49152 -3 -0 -1"


def test_transposed_matrices_are_read_as_they_are(events: Events) -> None:
    a, b = _empty(96, 128), _empty(64, 128)
    assert events(lambda: a @ b.t()) == "+24576"
    assert events(lambda: a.t()[:100] @ a[:, :50]) == "+20000"


def test_expanded_rows_are_copied(events: Events) -> None:
    a, b = _empty(128).expand(96, 128), _empty(128, 64)
    assert events(lambda: a @ b) == "+24576 +49152 -1"


def test_batches(events: Events) -> None:
    a, b = _empty(4, 32, 96), _empty(4, 48, 40)
    assert events(lambda: torch.bmm(a[..., ::2], b)) == "+20480 +24576 -1"
    assert events(lambda: torch.bmm(a[:1].expand(4, 32, 96)[..., :48], b)) == "+20480"


def test_matrix_and_vector(events: Events) -> None:
    a, v = _empty(512, 1536), _empty(768)
    assert events(lambda: torch.mv(a[:, ::2], v)) == "+2048 +1572864 -1"
    assert events(lambda: torch.mv(a[:, :768], v)) == "+2048"


def test_groups_in_bfloat16_have_arguments_in_memory(events: Events) -> None:
    a, b = _empty(256, 128, dtype=torch.bfloat16), _empty(4, 128, 256, dtype=torch.bfloat16)
    ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32, device="cuda")
    assert events(lambda: F.grouped_mm(a, b, offs=ends)) == "+131072 +240 +67584 -2 -1"


def _matrix(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda")


def test_an_inverse_needs_factors_pivots_and_a_copy(events: Events) -> None:
    made = events(lambda: torch.linalg.inv_ex(_matrix(512, 512)))
    assert made == "+1048576 +1048576 +4 +1048576 +2048 +8448 -5 +4096 +4096 +4096 +1048576 -9 -8 -7 -6 -4 -3 -0"


def test_a_factorisation_of_a_batch_keeps_pointers(events: Events) -> None:
    a = _matrix(64, 32, 32)
    assert events(lambda: torch.linalg.cholesky_ex(a)) == "+262144 +256 +512 -2"


def test_orthogonal_factors(events: Events) -> None:
    a = _matrix(100, 100)
    assert events(lambda: torch.linalg.qr(a)).startswith("+40000 +40000 +400 +4 +3145856 -4 -3 +4")


@pytest.mark.parametrize(("columns", "size"), [(100, 3145856), (512, 4194432), (1500, 8241280)])
def test_reflections(columns: int, size: int) -> None:
    assert householder_bytes(columns, 4) == size
    assert householder_bytes(64, 8) == 6291584, "double precision"


@pytest.mark.parametrize(
    "call", [torch.linalg.svd, torch.linalg.eigh, torch.linalg.qr, torch.linalg.inv, torch.linalg.cholesky]
)
def test_shapes_are_those_of_the_host(call: Callable[[torch.Tensor], object]) -> None:
    def shapes(result: object) -> list[torch.Size]:
        return [t.shape for t in (result if isinstance(result, tuple) else (result,))]

    assert shapes(call(_matrix(3, 5, 5))) == shapes(call(torch.eye(5).expand(3, 5, 5).clone()))


@given(st.integers(33, 4000), st.sampled_from([4, 8]))
def test_work_areas_grow_with_the_matrix(n: int, item: int) -> None:
    for size in (syevd_bytes, syevj_bytes):
        assert size(n, item) < size(n + 1, item)
    assert singular_bytes(n, n, item) < singular_bytes(n + 1, n + 1, item)

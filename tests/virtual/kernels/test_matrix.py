"""Matrix products against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

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

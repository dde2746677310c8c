"""The backward of embeddings against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _backward(rows: int, width: int, count: int, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    grad = torch.empty(count, width, dtype=dtype, device="cuda")
    indices = torch.randint(rows, (count,), device="cuda")
    return lambda: torch.ops.aten.embedding_dense_backward(grad, indices, rows, -1, False)


def test_few_indices_need_no_sorting(events: Events) -> None:
    assert events(_backward(100, 16, 3072)) == "+6400"


def test_many_are_sorted_and_summed_in_parts(events: Events) -> None:
    assert events(_backward(50257, 768, 8192)) == (
        "+65536 +65536 +65536 +150015 -3 -2 +154389504 +65536 +8 +65536 +1279 -8 -7 +65536 +65536 +1279 -11 +8 +72088 "
        "+27681792 -14 -13 -12 -10 -9 -6 -5 -1 -0"
    )


def test_few_rows_are_added_atomically_in_float32(events: Events) -> None:
    assert events(_backward(100, 16, 3073, torch.bfloat16)) == (
        "+24584 +24584 +24584 +67583 -3 -2 +3200 +24584 +8 +24584 +1279 -8 -7 +800 +800 +1279 -11 +8 +3256 +3256 +6400 "
        "-15 -14 -13 -12 -10 -9 -6 -5 -1 -0"
    )

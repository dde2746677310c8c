"""Indexing, embeddings, masks and counting against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _places(limit: int, count: int) -> torch.Tensor:
    return torch.randint(limit, (count,), device="cuda")


def test_a_mask_becomes_coordinates(events: Events) -> None:
    x = torch.empty(100, 16, device="cuda")
    mask = torch.arange(100, device="cuda") < 50
    assert events(lambda: x[mask]) == "+4 +1 -1 +400 +1023 -3 -0 +3200 -2"


def test_the_backward_of_indexing_sorts_the_places(events: Events) -> None:
    x = torch.empty(1000, 64, device="cuda", requires_grad=True)
    y = x[_places(1000, 5000)]
    gradient = torch.empty_like(y)
    measured = "+256000 +40000 +40000 -1 +40000 +40000 +40000 +87039 -6 -5 -4 -3 -2"
    assert events(lambda: torch.autograd.grad(y, x, gradient)) == measured


def test_adding_at_places_checks_their_range(events: Events) -> None:
    x, values, places = torch.empty(100, 16, device="cuda"), torch.empty(30, 16, device="cuda"), _places(100, 30)
    measured = "+8 +1 -1 -0 +8 +1 -3 -2 +240 +240 -4 +240 +240 +240 +1 -9 -8 -7 -6 -5"
    assert events(lambda: x.index_put_((places,), values, accumulate=True)) == measured


def test_a_scalar_under_a_mask_is_a_fill(events: Events) -> None:
    x, mask = torch.empty(100, 16, device="cuda"), torch.empty(100, 16, dtype=torch.bool, device="cuda")

    def assign() -> None:
        x[mask] = 0.0

    assert events(assign) == ""


def test_indices_of_the_host_travel(events: Events) -> None:
    x, places = torch.empty(100, 16, device="cuda"), torch.arange(20)
    assert events(lambda: x[places]) == "+160 +1280 -0"


def test_masked_scatter(events: Events) -> None:
    x, values = torch.empty(100, 16, device="cuda"), torch.empty(100, 16, device="cuda")
    mask = torch.empty(100, 1, dtype=torch.bool, device="cuda")
    assert events(lambda: x.masked_scatter(mask, values)) == "+6400 +12800 +1600 +1279 -3 -2 -1"


def test_known_masks_give_known_coordinates() -> None:
    mask = torch.tensor([[True, False], [True, True]], device="cuda")
    assert mask.nonzero().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert torch.tensor([5, 6], device="cuda")[torch.tensor([False, True], device="cuda")].tolist() == [6]
    rows, columns = torch.where(mask)
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [0, 0, 1])


def test_of_an_unknown_mask_everything_counts() -> None:
    assert (torch.rand(7, 3, device="cuda").sin() > 0.5).nonzero().shape == (21, 2)


def test_counting_and_repeating() -> None:
    x = torch.tensor([1, 1, 3], device="cuda")
    assert torch.bincount(x, minlength=6).tolist() == [0, 2, 0, 1, 0, 0]
    assert torch.repeat_interleave(x).tolist() == [0, 1, 2, 2, 2]
    assert torch.isin(x, torch.tensor([3], device="cuda")).tolist() == [False, False, True]
    assert torch.nn.functional.one_hot(x, 4).sum(0).tolist() == [0, 2, 0, 1]
    assert x.cumsum(0).tolist() == [1, 2, 5]


def test_writing_known_values_in_place() -> None:
    x = torch.zeros(4, dtype=torch.int64, device="cuda")
    x[torch.tensor([1, 1], device="cuda")] = 7
    x.index_put_((torch.tensor([2, 2], device="cuda"),), torch.tensor([1, 1], device="cuda"), accumulate=True)
    assert x.tolist() == [0, 7, 2, 0]


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

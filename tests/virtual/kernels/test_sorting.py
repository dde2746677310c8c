"""Sorting and selecting against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_short_rows_sort_in_place(events: Events) -> None:
    x = _empty(64, 1024)
    assert events(lambda: x.sort()) == "+262144 +524288 +8192 -2"


def test_one_long_row(events: Events) -> None:
    x = _empty(5000)
    assert events(lambda: x.sort()) == "+20000 +40000 +40000 +70143 -3 -2"


def test_some_long_rows_sort_with_their_number(events: Events) -> None:
    x = _empty(64, 4097, dtype=torch.bfloat16)
    expected = "+524416 +2097664 +2097664 +2097664 +524416 +2674943 -5 -4 +49663 -6 -3 -2"
    assert events(lambda: x.sort()) == expected


def test_long_columns_are_copied_to_rows(events: Events) -> None:
    x = _empty(100_000, 10)
    assert events(lambda: x.sort(0)) == (
        "+4000000 +8000000 +4000000 +4000000 +8000000 +8000000 +8000000 +4000000 +12200191 -8 -7 "
        "+180735 -9 -6 -5 -4 -3 -2"
    )


def test_topk_of_a_vocabulary_takes_many_blocks(events: Events) -> None:
    x = _empty(8, 50257)
    assert events(lambda: x.topk(5)) == (
        "+160 +320 +32 +64 +64 +204800 +8192 +1600 +1600 +1279 -9 +1279 -10 -8 -7 -6 -5 -4 -3 -2"
    )


def test_topk_of_few_experts_takes_none(events: Events) -> None:
    x = _empty(33, 65)
    assert events(lambda: x.topk(5)) == "+660 +1320"


def test_experts_are_chosen_evenly_and_once() -> None:
    chosen = torch.rand(4096, 8, device="cuda").softmax(-1).topk(2, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=8).cpu()
    assert counts.sum() == 8192
    assert counts.min() > 800
    assert (chosen[:, 0] != chosen[:, 1]).all().item() is True


def test_drawing_a_token(events: Events) -> None:
    weights = _empty(8, 50257)
    assert events(lambda: torch.multinomial(weights, 1)) == (
        "+64 +4 +200 +4 -3 -2 +1 +4 +200 +4 -7 -6 +1 +1 -8 -5 -4 -1 +32 +8 +1 -11 -10 +1 -13 +1608224 -14 -12 -9"
    )


def test_distinct_values_keep_the_storage_of_all(events: Events) -> None:
    x = torch.tensor([3, 1, 3], device="cuda")
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert (values.tolist(), inverse.tolist(), counts.tolist()) == ([1, 3], [1, 0, 1], [1, 2])
    assert values.untyped_storage().nbytes() == 24
    y = _empty(5000)
    assert events(lambda: torch.unique(y)) == "+20000 +29951 -1 +20000 +8 +1023 -4 -3 -0"


def test_known_values_sort() -> None:
    values, order = torch.tensor([3, 1, 2], device="cuda").sort(descending=True)
    assert (values.tolist(), order.tolist()) == ([3, 2, 1], [0, 2, 1])

"""Reductions against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_a_norm_over_all_stages_partial_results(events: Events) -> None:
    x = _empty(100_000, 3)
    assert events(lambda: torch.linalg.vector_norm(x, 2)) == "+4 +148 +4 -2 -1"


def test_a_sum_of_flags_casts_them_first(events: Events) -> None:
    x = _empty(33, 65, dtype=torch.bool)
    assert events(lambda: x.sum()) == "+8 +17160 -1"


def test_a_mean_of_a_million(events: Events) -> None:
    x = _empty(1024, 1024)
    assert events(lambda: x.mean(0)) == "+4096 +8388608 +32 -2 -1"


def test_small_reductions_allocate_their_result_alone(events: Events) -> None:
    x = _empty(33, 65)
    assert events(lambda: x.amax(1)) == "+132"


def test_known_values_are_reduced() -> None:
    x = torch.tensor([3, 9, 4], device="cuda")
    assert x.argmax().item() == 1
    assert x.argmin().item() == 0
    assert x.max(0).indices.item() == 1
    assert (x > 3).any().item() is True
    assert (x > 3).all().item() is False


def test_checks_of_unknown_values_hold() -> None:
    x = torch.rand(8, 8, device="cuda").sin() * 3  # of a sine nothing is assumed
    assert (x > 0).all().item() is True
    assert (x > 1).any().item() is False


def test_the_place_of_the_largest_is_a_place() -> None:
    x = torch.rand(64, 10, device="cuda")
    places = x.argmax(-1).tolist()
    assert all(0 <= place < 10 for place in places)
    assert len(set(places)) > 1

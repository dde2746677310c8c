"""Resizing, `unfold` and `fold` against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, last: bool = False) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, device="cuda").contiguous(memory_format=layout)


def test_few_channels_last_are_resized_through_copies(events: Events) -> None:
    x = _empty(1, 3, 224, 224, last=True)
    assert events(lambda: functional.interpolate(x, scale_factor=2)) == "+2408448 +2408448 +602112 -2 -1"


def test_enough_channels_have_a_kernel_of_their_own(events: Events) -> None:
    x = _empty(2, 8, 32, 32, last=True)
    assert events(lambda: functional.interpolate(x, scale_factor=2)) == "+262144"


def test_antialiasing_always_copies_channels_last(events: Events) -> None:
    x = _empty(2, 8, 32, 32, last=True)
    got = events(lambda: functional.interpolate(x, size=(20, 21), mode="bilinear", antialias=True))
    assert got == "+26880 +26880 +65536 -2 -1"


def test_unfold_keeps_the_bytes_of_its_input_where_it_needs_fewer(events: Events) -> None:
    x = _empty(4, 64, 14, 14)
    assert events(lambda: functional.unfold(x, 4, stride=4)) == "+200704"
    columns = functional.unfold(x, 4, stride=4)
    assert columns.shape == (4, 1024, 9)
    assert columns.untyped_storage().nbytes() == 200704


def test_fold_keeps_the_bytes_of_its_columns(events: Events) -> None:
    columns = _empty(2, 72, 900)
    assert events(lambda: functional.fold(columns, (32, 32), 3)) == "+518400"
    assert functional.fold(columns, (32, 32), 3).shape == (2, 8, 32, 32)

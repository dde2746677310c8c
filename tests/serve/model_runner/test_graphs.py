"""Which numbers of rows are captured."""

from itertools import pairwise

import pytest

from tonnage.budget.serving.own_engine import capture_sizes


def test_fine_steps_first() -> None:
    sizes = capture_sizes(256)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-2:] == [240, 256]
    assert len(sizes) == 23


@pytest.mark.parametrize("largest", [1, 3, 5, 64, 65, 79, 100, 1000])
def test_the_largest_is_always_there_and_padding_is_bounded(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes)) and sizes[0] == 1
    assert all(after - before <= 16 for before, after in pairwise(sizes))

"""What a plan needs of each part, and whether there is as much."""

import numpy as np
import pytest

from tonnage.budget.demands import Demand, shortages
from tonnage.units import GIB


def test_only_what_is_not_met_is_short() -> None:
    enough = Demand(part="GPU", needed_bytes=2 * GIB, available_bytes=2 * GIB)
    short = Demand(part="host", needed_bytes=40 * GIB, available_bytes=8 * GIB, gpus=8)
    assert shortages([enough, short]) == (short,)
    assert (enough.missing_bytes, short.missing_bytes) == (0, 4 * GIB)


def test_of_many_configurations_each_is_told_by_itself() -> None:
    many = Demand(part="GPU", needed_bytes=np.array([1.0, 3.0, 5.0]), available_bytes=3)
    assert many.is_met.tolist() == [True, True, False]
    assert many.missing_bytes.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("needed_bytes", "words"),
    [
        (81 * GIB, "a GPU needs 81.0 GiB and has 80.0 GiB"),
        (80 * GIB + GIB // 50, "a GPU needs 80.02 GiB and has 80.00 GiB"),
        (80 * GIB + 1, "a GPU needs 80.000000001 GiB and has 80.000000000 GiB"),
    ],
)
def test_figures_have_the_digits_that_tell_them_apart(needed_bytes: int, words: str) -> None:
    assert Demand(part="GPU", needed_bytes=needed_bytes, available_bytes=80 * GIB).words == words

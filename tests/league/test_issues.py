"""Programs that were posted in issues: every figure is read or counted, and two are predicted within the digits printed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"


@pytest.fixture
def source() -> Iterator:
    sys.path.insert(0, str(LEAGUE))
    try:
        from sources.issues import SOURCE

        yield SOURCE
    finally:
        sys.path.remove(str(LEAGUE))


def test_figures_are_read_or_counted(source) -> None:
    reading = source.read()
    assert len(reading.rows) == 15
    assert reading.left_out.total() == 31
    assert len({row.name for row in reading.rows}) == len(reading.rows)


@pytest.mark.parametrize("name", ["pytorch/pytorch#138685 products", "pytorch/pytorch#38568 volume"])
def test_some_are_predicted_within_the_digits_printed(source, name: str) -> None:
    row = next(row for row in source.read().rows if row.name == name)
    assert abs(source.predict(row).predicted - row.measured) <= row.resolution

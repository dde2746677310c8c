"""timm's published batches: what is read of them, and some that are predicted."""

import sys
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"


@pytest.fixture(autouse=True)
def _league(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LEAGUE))


def test_every_line_is_read_or_counted() -> None:
    from sources.timm import read

    reading = read()
    lines = {row.name.rsplit(" ", 1)[0] for row in reading.rows}
    assert len(reading.rows) == 598 and len(lines) == 338
    assert sum(row.fits is False for row in reading.rows) == 260
    assert len(lines) + reading.left_out.total() == 26_244
    assert {row.torch for row in reading.rows} == {"1.12", "1.13", "2.1", "2.4", "2.9"}
    assert len({row.card for row in reading.rows}) == 4


def test_the_series_is_that_of_the_publisher() -> None:
    from sources.timm import series

    assert series(64) == [64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="a run is a fork")
def test_verdicts_of_both_sides_of_a_boundary() -> None:
    from sources.timm import predict, read

    rows = [row for row in read().rows if "pt240-cu124-rtx3090 efficientnet_b6 528" in row.name and "nchw" in row.name]
    assert [(row.case["batch"], row.fits) for row in rows] == [(128, True), (192, False)]
    assert [predict(row).fits for row in rows] == [True, False]

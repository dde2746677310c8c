"""Public snapshots: their figures are whole, and a few are predicted to the byte."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"


@pytest.fixture
def source() -> Iterator:
    sys.path.insert(0, str(LEAGUE))
    try:
        from sources.snapshots import SOURCE

        yield SOURCE
    finally:
        sys.path.remove(str(LEAGUE))


def test_every_snapshot_agrees_with_an_independent_walk() -> None:
    """But for one that a program made up: its blocks lie in no segment."""
    with (LEAGUE / "figures" / "snapshots.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 22
    strange = [line["path"] for line in lines if line["agrees"] != "True" or line["replay_differences"] != "0"]
    assert strange == ["test/snapshots/output.pickle"]


def test_rows_are_read_or_counted(source) -> None:
    reading = source.read()
    assert len(reading.rows) == 57
    assert reading.left_out["torch.compile"] == 21
    assert reading.left_out.total() == 24
    assert len({row.name for row in reading.rows}) == len(reading.rows)


@pytest.mark.parametrize("name", ["kkaitlyn111/memory_ctx128_forward_mixed", "attention 1024 x 64"])
def test_some_are_predicted_to_the_byte(source, name: str) -> None:
    rows = [row for row in source.read().rows if row.name.startswith(name)]
    assert rows
    for row in rows:
        assert abs(source.predict(row).predicted - row.measured) <= row.resolution

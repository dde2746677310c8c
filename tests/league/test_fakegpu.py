"""FakeGPU's published fine-tunings, and one of them predicted."""

import sys
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"
sys.path.insert(0, str(LEAGUE))

from sources import fakegpu  # noqa: E402


def test_every_row_is_read_or_left_out_with_a_reason() -> None:
    reading = fakegpu.read()
    assert (len(reading.rows), reading.left_out.total()) == (24, 14)
    assert all("FakeGPU static" in row.rivals for row in reading.rows)


def test_a_whole_model_is_predicted() -> None:
    pytest.importorskip("peft")
    row = next(row for row in fakegpu.read().rows if row.name.startswith("0.8B full 16"))
    found = fakegpu.predict(row)
    assert found.predicted is not None, found.refused
    assert found.predicted == pytest.approx(row.measured, rel=0.005)

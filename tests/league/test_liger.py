"""Liger-Kernel's published benchmarks, and three of them predicted."""

import sys
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"
sys.path.insert(0, str(LEAGUE))

from sources import liger  # noqa: E402


def test_every_row_is_read_or_left_out_with_a_reason() -> None:
    reading = liger.read()
    assert len(reading.rows) + reading.left_out.total() == 1228
    assert len(reading.rows) >= 900
    assert len({row.name for row in reading.rows}) == len(reading.rows)


@pytest.mark.parametrize(
    "benchmark", [("main", "cross_entropy", "a100-80"), ("main", "softmax", "rtx-3090"), ("main", "tvd", "h100")]
)
def test_plain_rows_are_equal_to_what_was_published(benchmark: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    plain = [row for row in liger.by_benchmark()[benchmark] if row.case["provider"] != "liger"][:3]
    found = liger.predictions(plain)
    for row in plain:
        predicted = found[row.name].predicted
        assert predicted is not None, found[row.name].refused
        assert abs(predicted - (row.measured or 0)) <= row.resolution, row.name

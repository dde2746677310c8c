"""Liger-Kernel's published benchmarks, and three of them predicted."""

import pytest
from sources import liger


def test_every_row_is_read_or_left_out_with_a_reason() -> None:
    readings = [liger.read(), liger.read(own=True)]
    assert sum(len(reading.rows) + reading.left_out.total() for reading in readings) == 1228
    rows = [row for reading in readings for row in reading.rows]
    assert len({row.name for row in rows}) == len(rows) == 1064


@pytest.mark.parametrize(
    "benchmark", [("main", "cross_entropy", "a100-80"), ("main", "softmax", "rtx-3090"), ("main", "tvd", "h100")]
)
def test_plain_rows_are_equal_to_what_was_published(benchmark: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    plain = liger.by_benchmark()[benchmark][:3]
    found = liger.predictions(plain)
    for row in plain:
        predicted = found[row.name].predicted
        assert predicted is not None, found[row.name].refused
        assert abs(predicted - (row.measured or 0)) <= row.resolution, row.name

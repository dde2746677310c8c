"""xMem's published runs: what was read of them, and three that are predicted anew."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "league"))
from sources.xmem import predict, read

ROWS = {row.name: row for row in read().rows}


def test_every_run_that_was_read_has_a_figure_or_ran_out() -> None:
    assert len(ROWS) == 165
    assert {row.card for row in ROWS.values()} == {"rtx-3060", "rtx-4060", "a100-40"}
    assert sum(row.measured is None for row in ROWS.values()) == sum(not row.fits for row in ROWS.values()) == 30
    assert all("xMem" in row.rivals for row in ROWS.values())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("001-Anova/Transformer/001/T5-small/SGD/30/rtx-3060/20c2", 0.005),
        ("002-Monte Carlo/CNN/001/MobeNetV3Small/Adam/702/rtx-3060/c94e", 0.02),
        ("002-Monte Carlo/CNN/001/ConvNeXtTiny/Adam/282/rtx-3060/3918", 0.04),
    ],
)
def test_a_run_is_predicted(name: str, error: float) -> None:
    row = ROWS[name]
    said = predict(row)
    assert row.measured and said.predicted and said.fits
    assert abs(said.predicted / row.measured - 1) < error

"""The league's source of GPUMemNet: every figure is counted, and perceptrons are predicted to the MiB."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "league"))
from sources.gpumemnet import MIB, SOURCE, faketensor, fixed_bytes


def test_every_figure_is_read_or_counted() -> None:
    reading = SOURCE.read()
    assert len(reading.rows) + reading.left_out.total() == 3000 + 3000 + 5085 + 18 + 536 + 6 + 2
    assert len({row.name for row in reading.rows}) == len(reading.rows)


def test_a_larger_batch_that_took_less_has_died() -> None:
    rows = [row for row in SOURCE.read().rows if row.case["set"] == "timm"]
    assert {row.fits for row in rows if row.measured is None} == {False}
    assert all(faketensor(row).predicted is None for row in rows if row.measured is None)


@pytest.mark.parametrize("kind", ["mlp1", "mlp2"])
def test_perceptrons(kind: str) -> None:
    row = next(row for row in SOURCE.read().rows if row.case["set"] == kind and int(row.case["outputs"]) > 1)
    assert fixed_bytes("mlp") == 1429 * MIB
    assert SOURCE.predict(row).predicted == pytest.approx(row.measured, rel=0.02)

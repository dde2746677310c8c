"""The source `tables`: what is read, what is left out, and a few of its rows."""

from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    from sources import tables

    return tables


def test_every_row_is_read_or_counted(tables: ModuleType) -> None:
    reading = tables.read()
    assert len(reading.rows) == 152
    assert reading.left_out.total() == 256 + 52 - 152
    assert len({row.name for row in reading.rows}) == 152


@pytest.mark.parametrize("name", ["torchtitan-002", "torchtitan-003", "torchtitan-004"])
def test_rows_are_predicted_by_the_plan(tables: ModuleType, name: str) -> None:
    row = next(row for row in tables.read().rows if row.name == name)
    said = tables.predict(row).predicted
    assert said == pytest.approx(row.measured, rel=0.05)
    assert row.resolution == int(0.05 * 2**30)
    assert row.card == "h100-96"

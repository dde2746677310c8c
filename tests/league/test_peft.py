"""The source `peft`: what is read, the lengths that stand for the data, and one of its runs."""

from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    from sources import peft

    return peft


def test_every_figure_is_read_or_counted(peft: ModuleType) -> None:
    reading = peft.read()
    assert len(reading.rows) + reading.left_out.total() == 2 * (63 + 31)
    assert len({row.name for row in reading.rows}) == len(reading.rows)


def test_lengths_have_the_mean_and_the_cap_that_were_published(peft: ModuleType) -> None:
    mean, shortest = peft._lengths(4_198_051, 5_000)
    assert shortest < 4_198_051 / 20_000 < mean < peft.LONGEST


def test_lora_on_a_language_model(peft: ModuleType) -> None:
    rows = [row for row in peft.read().rows if row.name.startswith("MetaMathQA/lora/llama-3.2-3B-rank32 ")]
    assert [row.meter for row in rows] == ["reserved", "allocated"]
    for row in rows:
        said = peft.predict(row)
        assert not said.refused
        assert said.predicted == pytest.approx(row.measured, rel=0.01)

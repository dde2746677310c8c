import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import Run, training_run
from tonnage.errors import BadSize
from tonnage.explain.diff import Growth, GrowthLimit, compare, passes
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.units import MIB


def test_a_run_against_itself_has_not_changed() -> None:
    difference = compare(training_run(), training_run())
    tables = (difference.peaks, difference.categories, difference.modules, difference.lines)
    assert not any(growth.grew_bytes for table in tables for growth in table)


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_table_sums_to_the_growth_of_the_peak(before: int, after: int) -> None:
    first, second = training_run(batch=before), training_run(batch=after)
    difference = compare(first, second)
    grew = second.peak_allocated_bytes - first.peak_allocated_bytes
    for table in (difference.categories, difference.modules, difference.lines):
        assert sum(growth.grew_bytes for growth in table) == grew
        assert [abs(g.grew_bytes) for g in table] == sorted((abs(g.grew_bytes) for g in table), reverse=True)


def test_what_grew_is_named() -> None:
    difference = compare(training_run(batch=4), training_run(batch=8))
    assert difference.categories[0].name == "activations"
    assert difference.lines[0].name == "train.py:88"
    assert "layers.*.mlp" in [growth.name for growth in difference.modules]


@pytest.mark.parametrize(
    ("text", "grew", "is_passed"),
    [
        ("10%", 10, False),
        ("10 %", 11, True),
        ("5.5%", 6, True),
        ("1MiB", 1, False),
        ("1 MiB", 2, True),
        ("0", 0, False),
    ],
)
def test_a_limit_is_a_size_or_a_share(text: str, grew: int, is_passed: bool) -> None:
    assert GrowthLimit.parse(text).is_passed_by(Growth("x", 100 * MIB, (100 + grew) * MIB)) is is_passed


@pytest.mark.parametrize("text", ["", "much", "10%%", "-5%", "5 percent"])
def test_what_is_neither_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadSize) as caught:
        GrowthLimit.parse(text)
    assert "5%" in caught.value.hint


def test_less_passes_no_limit() -> None:
    assert not passes(compare(training_run(batch=8), training_run(batch=4)), GrowthLimit.parse("0%"))
    assert passes(compare(training_run(batch=4), training_run(batch=8)), GrowthLimit.parse("0%"))


def test_phases_are_compared_by_their_peaks() -> None:
    def evaluating(size: int) -> Recording:
        run = Run()
        run.alloc(64 * MIB, Category.PARAMETERS)
        run.phase("evaluation")
        run.alloc(size, Category.ACTIVATIONS)
        return run.recording

    found = compare(evaluating(8 * MIB), evaluating(40 * MIB)).phases
    assert [(growth.name, growth.grew_bytes) for growth in found] == [("evaluation", 32 * MIB), ("setup", 0)]

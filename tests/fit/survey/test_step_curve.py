"""Curves through a few points. That composed steps take what is predicted, test_limits shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.fit.survey.step_curve import extrapolate
from tonnage.units import MIB

counts = st.integers(0, 1 << 20)


@given(counts, counts, st.integers(1, 1000))
def test_a_line_goes_on_as_a_line(start: int, slope: int, size: int) -> None:
    for sizes in ([2, 3], [2, 3, 7]):
        values = [start + slope * one for one in sizes]
        assert extrapolate(sizes, values, size) == pytest.approx(start + slope * size, abs=1)


@given(counts, counts, st.integers(1, 1 << 20), st.integers(1, 1000))
def test_a_parabola_goes_on_as_a_parabola(start: int, slope: int, bend: int, size: int) -> None:
    def value(at: int) -> int:
        return start * 8 + slope * at + (bend + start + slope) * at * at

    assert extrapolate([2, 4, 7], [value(at) for at in (2, 4, 7)], size) == pytest.approx(value(size), rel=1e-6, abs=1)


def test_a_bend_of_the_allocator_s_rounding_is_none() -> None:
    values = [1000 * MIB, 2000 * MIB - 1 * MIB, 3000 * MIB]
    assert extrapolate([10, 20, 30], values, 3000) == pytest.approx(300_000 * MIB, rel=2e-3)


def test_what_is_full_stays_full() -> None:
    assert extrapolate([10, 20, 30], [100, 512, 512], 300) == 512
    assert extrapolate([10, 20, 30], [100, 512, 512], 15) == 306


def test_one_point_is_in_proportion() -> None:
    assert extrapolate([4], [400], 10) == 1000


def test_nothing_is_less_than_nothing() -> None:
    assert extrapolate([1, 2], [100, 50], 10) == 0

"""A card lowers its clock where a step would draw more than its limit."""

from pytest import approx

from tonnage.clock.power import limit_of, slowdown
from tonnage.hardware import find_gpu


def test_what_moves_bytes_alone_is_within_the_limit() -> None:
    assert slowdown([(1.0, 0.0)], 1.0) == 1.0


def test_products_alone_slow_down_as_they_did_on_the_card() -> None:
    """0.00138 s in a burst and 0.00163 s from a fifth of a second on, at 81 % of the peak."""
    assert slowdown([(1.0, 0.807)], 1.0) == approx(0.00163 / 0.00138, rel=0.02)


def test_pauses_let_the_card_keep_its_clock() -> None:
    assert slowdown([(1.0, 0.8)], 3.0) == 1.0
    assert slowdown([], 0.0) == 1.0


def test_a_chip_that_is_sold_with_less_is_limited_as_if_it_had_been_lowered() -> None:
    assert limit_of(find_gpu("h100-96")) == approx(500 / 700)
    assert limit_of(find_gpu("h100")) == 1

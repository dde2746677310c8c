"""Shares of random masks and counts of distinct values, without a tensor."""

import pytest

from tonnage.virtual.assumptions import (
    Laws,
    Mask,
    Sample,
    as_integers,
    as_mask,
    beyond_tolerance,
    compare,
    derive,
    distinct_values,
    mask_of_share,
    reduced,
    sample,
    scaled,
)


def law(operator: str, *numbers: float) -> Sample:
    made = sample(operator, numbers)
    assert isinstance(made, Sample)
    return made


@pytest.mark.parametrize(
    ("operator", "number", "share"),
    [("gt", 0.2, 0.8), ("ge", 0.2, 0.8), ("lt", 0.2, 0.2), ("le", 2.0, 1), ("eq", 0.5, 0)],
)
def test_a_comparison_gives_the_share(operator: str, number: float, share: float) -> None:
    assert compare(operator, law("uniform_"), number).share == pytest.approx(share)


def test_normal_and_whole_numbers() -> None:
    assert compare("gt", law("normal_"), 1.0).share == pytest.approx(0.158655, abs=1e-6)
    assert compare("lt", law("normal_", 5.0, 2.0), 5.0).share == pytest.approx(0.5)
    assert compare("eq", law("random_", 0.0, 10.0), 3.0).share == pytest.approx(0.1)
    assert compare("le", law("random_", 10.0), 3.0).share == pytest.approx(0.4)
    assert compare("ne", law("random_", 10.0), 3.5).share == pytest.approx(1.0)


def test_masks_of_one_tensor_are_not_independent() -> None:
    x, y = law("uniform_"), law("uniform_")
    between = compare("gt", x, 0.2) & compare("lt", x, 0.5)
    assert between.share == pytest.approx(0.3)
    assert (compare("gt", x, 0.2) & compare("lt", y, 0.5)).share == pytest.approx(0.4)
    assert (compare("lt", x, 0.2) | compare("gt", x, 0.5)).share == pytest.approx(0.7)
    assert (compare("lt", x, 0.5) | compare("lt", y, 0.5)).share == pytest.approx(0.75)
    assert (compare("gt", x, 0.8) & compare("lt", scaled(x, -1.0, 0.0) or x, -0.9)).share == pytest.approx(0.1)


@pytest.mark.parametrize("elements", [5, 7, 1000, 1001])
def test_a_mask_and_its_complement_add_up(elements: int) -> None:
    mask = compare("gt", law("uniform_"), 0.5)
    assert mask.count(elements) + (~mask).count(elements) == elements


def test_numbers_of_a_mask() -> None:
    mask = mask_of_share(0.3)
    assert compare("gt", mask, 0.5) == mask
    assert compare("eq", mask, 0.0).share == pytest.approx(0.7)
    assert compare("ge", mask, 0.0).share == 1 and compare("gt", mask, 1.0).share == 0


def test_arithmetic_moves_a_law() -> None:
    x = law("uniform_")
    moved = derive("add", [derive("mul", [x, 4.0]), -2.0])
    assert isinstance(moved, Sample) and compare("gt", moved, 1.0).share == pytest.approx(0.25)
    assert derive("div", [x, 0.0]) is None
    flipped = derive("sub", [1.0, x])
    assert isinstance(flipped, Sample) and compare("lt", flipped, 0.1).share == pytest.approx(0.1)
    assert derive("lt", [0.9, x]) == compare("gt", x, 0.9)


def test_what_is_expected_to_be_distinct() -> None:
    assert distinct_values(law("random_", 5000.0), 10**6) == 5000
    assert distinct_values(law("random_", 10**6), 10**6) == pytest.approx(632_121, abs=2)
    assert distinct_values(law("uniform_"), 100) == distinct_values(None, 100) == 100
    assert distinct_values(law("fill_", 3.0), 100) == 1 and distinct_values(mask_of_share(0.5), 100) == 2
    whole = as_integers(derive("mul", [law("uniform_"), 50.0]) or law("zero_"))
    assert distinct_values(whole, 10**6) == 50


def test_constants_and_probabilities() -> None:
    assert as_mask(law("zero_")).share == 0 and as_mask(law("fill_", 1.0)).share == 1
    drawn = sample("bernoulli_", [0.15])
    assert isinstance(drawn, Mask) and drawn.count(1000) == 150
    assert reduced("sum", drawn, 1000) == 150 and reduced("all", drawn, 1000) == 0 and reduced("max", drawn, 9) is None


def test_numbers_lie_beyond_a_tolerance() -> None:
    assert beyond_tolerance("gt", 1e-10) is True and beyond_tolerance("le", 1e-7) is False
    assert beyond_tolerance("gt", -1e-9) is False  # a slope that points down
    assert beyond_tolerance("gt", 0.0) is None and beyond_tolerance("lt", 0.5) is None


def test_old_records_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.virtual.assumptions.MOST_LAWS", 2)
    laws = Laws()
    numbers = [laws.add(mask_of_share(0.5)) for _ in range(3)]
    assert laws.of(numbers[0]) is None and laws.of(numbers[2]) is not None
    assert laws.add(None) == 0

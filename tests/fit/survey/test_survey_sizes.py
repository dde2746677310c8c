"""Sizes that are not measured are in line with those that are."""

from dataclasses import astuple, replace

from pytest import approx

from tonnage.fit.survey.profile import BlockProfile, OutsideProfile
from tonnage.fit.survey.survey import KEEP, SizeProfile, Survey


def size(rows: int) -> SizeProfile:
    block = BlockProfile(
        parameters_bytes=100, input_bytes=10 * rows, kept_bytes=50 + 30 * rows,
        forward_peak_bytes=40 * rows, backward_peak_bytes=60 * rows, forward_s=0.5 * rows, backward_s=1.0 * rows,
    )  # fmt: skip
    outside = OutsideProfile(
        kept_bytes=7 * rows, peak_bytes=20 + 9 * rows, between_peak_bytes=(8 * rows,), forward_s=0.1 * rows, backward_s=0.2 * rows
    )  # fmt: skip
    kind = f"Block|a|{rows}"
    return SizeProfile(rows, {"0": kind, "1": kind}, {kind: {KEEP: block}}, outside)


def numbers(outside: OutsideProfile) -> list[float]:
    return [*outside.between_peak_bytes, *astuple(replace(outside, between_peak_bytes=()))[:3], outside.forward_s]


def survey_of(*measured: SizeProfile) -> Survey:
    survey = object.__new__(Survey)
    survey.sizes, survey.supposed = {one.rows: one for one in measured}, set()
    survey._ways_at, survey.outside = {}, {}
    return survey


def test_a_size_that_was_not_measured_is_in_line_with_two_that_were() -> None:
    survey = survey_of(size(2), size(8))
    for rows in (4, 16):
        survey.suppose(rows, survey)
        found, expected = survey.sizes[rows], size(rows)
        assert found.rows == rows
        assert numbers(found.outside) == approx(numbers(expected.outside))
        assert found.kept("1").kept_bytes == expected.kept("1").kept_bytes
        assert found.kept("1").forward_s == approx(expected.kept("1").forward_s)
    assert survey.supposed == {4, 16}
    assert list(survey.measured) == [2, 8]


def test_it_grows_as_the_blocks_did_before_they_were_compiled() -> None:
    def halved(one: SizeProfile) -> SizeProfile:
        kind = one.kinds["0"]
        kept = one.kept("0")
        faster = replace(kept, kept_bytes=kept.kept_bytes // 2, forward_s=kept.forward_s / 2)
        return replace(one, blocks={kind: {KEEP: faster}})

    compiled, eager = survey_of(halved(size(8))), survey_of(size(2), size(8))
    compiled.suppose(4, eager)
    expected = halved(size(4))
    assert compiled.sizes[4].kept("0").kept_bytes == expected.kept("0").kept_bytes
    assert compiled.sizes[4].kept("0").forward_s == approx(expected.kept("0").forward_s)
    assert numbers(compiled.sizes[4].outside) == approx(numbers(expected.outside))


def test_what_was_compiled_at_a_size_of_its_own_grows_in_line_with_the_others_too() -> None:
    compiled, eager = survey_of(size(32)), survey_of(size(2), size(8))
    compiled.suppose(16, eager)
    assert compiled.sizes[16].kept("0").kept_bytes == size(16).kept("0").kept_bytes
    assert compiled.sizes[16].kept("0").forward_s == approx(size(16).kept("0").forward_s)


def test_from_one_size_alone_nothing_is_made_up() -> None:
    survey = survey_of(size(2))
    survey.suppose(4, survey)
    assert list(survey.sizes) == [2]


def test_what_was_measured_is_not_supposed() -> None:
    survey = survey_of(size(2), size(8))
    survey.suppose(8, survey)
    assert not survey.supposed
    survey.suppose(4, survey)
    survey.drop(4)
    assert list(survey.sizes) == [2, 8]
    assert not survey.supposed


def test_what_is_outside_of_blocks_is_in_line_with_the_nearest_that_were_measured() -> None:
    survey = survey_of(size(4), size(8))
    survey.outside[32] = replace(size(32).outside, kept_bytes=7 * 8)  # it grows no more
    for rows, kept_bytes in ((2, 7 * 2), (16, 7 * 8), (64, 7 * 8), (8, 7 * 8)):
        survey.suppose(rows, survey)
        assert survey.sizes[rows].outside.kept_bytes == kept_bytes
    assert survey.sizes[16].kept("0").kept_bytes == size(16).kept("0").kept_bytes


def test_a_row_of_a_smaller_size_takes_no_more_time_than_one_of_the_nearest_that_was_measured() -> None:
    def bound_by_the_host(one: SizeProfile) -> SizeProfile:
        return replace(
            one, blocks={kind: {KEEP: replace(ways[KEEP], forward_s=9.0)} for kind, ways in one.blocks.items()}
        )

    compiled, eager = survey_of(size(32)), survey_of(bound_by_the_host(size(1)), size(32))
    compiled.suppose(8, eager)
    assert compiled.sizes[8].kept("0").forward_s == approx(size(8).kept("0").forward_s)

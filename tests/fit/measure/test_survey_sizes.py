"""Sizes between measured ones are in line with them."""

from unittest.mock import Mock

from tonnage.fit.measure.profile import BlockProfile, OutsideProfile
from tonnage.fit.measure.survey import KEEP, SizeProfile, Survey


def size(rows: int) -> SizeProfile:
    block = BlockProfile(
        name="0", kind=f"Block|a|{rows}", parameters_bytes=100, input_bytes=10 * rows, kept_bytes=50 + 30 * rows,
        forward_peak_bytes=40 * rows, backward_peak_bytes=60 * rows, forward_s=0.5 * rows, backward_s=1.0 * rows,
    )  # fmt: skip
    outside = OutsideProfile(kept_bytes=7 * rows, peak_bytes=20 + 9 * rows, forward_s=0.1 * rows, backward_s=0.2 * rows)
    return SizeProfile(rows, {"0": block.kind, "1": block.kind}, {block.kind: {KEEP: block}}, outside)


def test_a_size_between_two_is_what_both_say() -> None:
    survey = Mock(spec=Survey, sizes={2: size(2), 8: size(8)}, supposed=set())
    Survey.between(survey, 4)
    found, expected = survey.sizes[4], size(4)
    assert found.rows == 4
    assert survey.supposed == {4}
    assert found.outside == expected.outside
    assert found.kept("1").kept_bytes == expected.kept("1").kept_bytes == 170
    assert found.kept("1").forward_s == 2.0


def test_beyond_what_was_measured_nothing_is_made_up() -> None:
    survey = Mock(spec=Survey, sizes={2: size(2), 8: size(8)}, supposed=set())
    for rows in (1, 2, 16):
        Survey.between(survey, rows)
    assert sorted(survey.sizes) == [2, 8]

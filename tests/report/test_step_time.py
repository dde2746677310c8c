"""The time of a step in words and figures."""

from dataclasses import replace

import pytest

from clock.test_step import PRODUCT, step
from tonnage.recording import Header, Recording
from tonnage.report.step_time import Campaign, hours_words, time_figures, time_lines, time_words


def recording(**changes: object) -> Recording:
    header = Header(
        gpu="h200", gpu_name="NVIDIA H200", capacity_bytes=150 << 30, torch_modelled="2.11.0", torch_installed="2.11.0"
    )
    captured = replace(step(PRODUCT, times=50), **changes)  # type: ignore[arg-type]
    return Recording(header, captured=captured)


def words(found: Recording, **campaign: float) -> str:
    return "\n".join(line.plain for line in time_lines(found, Campaign(**campaign)))


def test_a_step_is_told_with_its_range_its_pace_and_what_it_is_spent_on() -> None:
    found = words(recording())
    assert "a step takes about" in found
    assert "on the h200 (" in found
    assert "tokens/s" in found
    assert "% of its peak" in found
    assert "matmul" in found
    assert all(len(line) <= 80 for line in found.splitlines())


def test_the_whole_training_is_told_where_one_is_named() -> None:
    found = words(recording(), tokens=1e9, price=2.5)
    assert "1 B tokens: " in found
    assert "at 2.50 an hour: " in found
    assert "4 M samples: " in words(recording(tokens=None), samples=2e6, epochs=2)
    assert "samples/s" in words(recording(tokens=None))


def test_what_a_step_holds_may_be_unknown() -> None:
    found = words(recording(tokens=None, samples=None), tokens=1e9)
    assert "is not known" in found
    assert "/s" not in found


def test_figures_say_the_same() -> None:
    found = time_figures(recording(), Campaign(tokens=1e9, price=2.0))
    assert found["step_time_low_s"] < found["step_time_s"] < found["step_time_high_s"]
    assert found["tokens_per_s"] == pytest.approx(4096 / found["step_time_s"])
    assert found["training_s"] == pytest.approx(1e9 / found["tokens_per_s"])
    assert found["training_cost"] == pytest.approx(found["training_s"] / 3600 * 2.0)
    assert found["time_by_kind"]["matmul"] > 0


def test_a_card_on_which_the_run_does_not_fit_has_no_step_time() -> None:
    found = recording()
    found.header = replace(found.header, outcome="oom")
    assert found.step_time is None
    assert time_figures(found) == {}
    assert list(time_lines(found)) == []


def test_without_a_captured_step_nothing_is_said() -> None:
    silent = Recording(recording().header)
    assert words(silent) == ""
    assert time_figures(silent) == {}


@pytest.mark.parametrize("extent", [10**400, 0])
def test_a_file_with_mad_numbers_breaks_nothing(extent: int) -> None:
    found = recording()
    assert found.captured is not None
    found.captured = replace(found.captured, calls=(replace(PRODUCT, shapes=((extent, 3), (3, extent))),))
    assert "nan" not in words(found)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(123.4, "123 s"), (1.234, "1.23 s"), (0.4123, "412 ms"), (0.0412, "41.2 ms"), (2e-4, "0.2 ms"), (2e-5, "20 µs")],
)
def test_times_have_three_figures(seconds: float, shown: str) -> None:
    assert time_words(seconds) == shown


@pytest.mark.parametrize(("hours", "shown"), [(0.5, "30.0 minutes"), (7, "7.0 hours"), (100, "4.2 days")])
def test_hours_are_told_in_the_unit_that_suits(hours: float, shown: str) -> None:
    assert hours_words(hours) == shown

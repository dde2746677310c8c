"""A plan in words, at home in 80 columns."""

from dataclasses import replace

from fit.test_plan import make_plan
from tonnage.fit.choose.account import account
from tonnage.fit.plan import Row
from tonnage.fit.rehearsal import Rehearsed
from tonnage.units import GIB

ROW = Row(
    name="recompute",
    title="recompute in backward",
    saved_bytes=30 * GIB,
    seconds=0.798,
    why="the fastest choice of modes within the budget: 28 block+offload, 3 part:mlp, 1 keep, and words that go on",
)
PLAN = replace(
    make_plan(), budget_bytes=40 * GIB, plain_peak_bytes=70 * GIB, peak_bytes=39 * GIB, step_s=3.2, rows=(ROW,)
)


def measured(reserved_bytes: int) -> Rehearsed:
    return Rehearsed(peak_allocated_bytes=reserved_bytes, peak_reserved_bytes=reserved_bytes, stepped=True)


def test_it_tells_before_each_technique_and_after() -> None:
    lines = account(PLAN, measured(39 * GIB)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("plain") and "70.00 GiB" in line for line in lines)
    assert any("recompute in backward" in line and "−30.00 GiB" in line and "+798 ms" in line for line in lines)
    assert any(line.startswith("fitted, predicted") and "39.00 GiB" in line and "3.20 s" in line for line in lines)
    assert any(line.startswith("fitted, measured") and "39.00 GiB" in line for line in lines)


def test_a_plain_training_that_could_not_be_measured_has_no_number() -> None:
    words = account(replace(PLAN, plain_peak_bytes=0), None)
    assert max(map(len, words.splitlines())) <= 80
    assert "does not fit" in words
    assert "0 B" not in words


def test_a_time_that_rounds_to_nothing_has_no_sign() -> None:
    words = account(replace(PLAN, rows=(replace(ROW, seconds=-0.0001), replace(ROW, seconds=0.0001))), None)
    assert "−0 ms" not in words and "+0 ms" not in words and words.count(" 0 ms") == 2


def test_words_are_broken_at_spaces_alone_and_fill_their_lines() -> None:
    why = f"pays: it saves 2.44 GiB and 12 ms; measured on {'x' * 26}-{'y' * 18} in proportion for the rest"
    lines = account(replace(PLAN, rows=(replace(ROW, why=why),)), None).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("      ") and "peak" not in line] == ["on", "rest"]

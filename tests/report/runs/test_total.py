from dataclasses import replace

import pytest

from support import gone_on, training_run
from tonnage.explain import Advice, diagnose
from tonnage.explain.total import Total
from tonnage.recording import Recording
from tonnage.recording.beyond import PATIENCE, REPEATS, TO_ITS_END
from tonnage.report.html.page import advice_section
from tonnage.report.runs.explain import diagnosis_sections, explain_figures
from tonnage.report.runs.total import larger_card_words, total_lines

TOTAL = Total(34 * 2**30, 32 * 2**30, 2, "backward", "train.py:9", TO_ITS_END, 5, 8)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return gone_on(batch=96, layers=12)


def words(recording: Recording, advice: Advice, **options: bool) -> str:
    return "\n".join(line.plain for line in total_lines(recording, advice, **options))


def test_one_sentence_says_it(recording: Recording) -> None:
    said = words(recording, Advice(larger_card="a100-40", total=TOTAL))
    assert "needs 34.00 GiB in all; the a100-40 holds it; batch 5 of 8 fits here" in said
    assert "most of it in step 2, backward, at train.py:9" in said


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (REPEATS, "its steps repeated"),
        (PATIENCE, "five minutes"),
        ("ValueError: own", "failed later: ValueError: own"),
    ],
)
def test_how_far_it_was_seen_is_said(recording: Recording, ending: str, said: str) -> None:
    found = words(recording, Advice(total=replace(TOTAL, ending=ending, batch=None)))
    assert said in found and "no known card holds" in found
    assert ("at least" in found) == (ending != REPEATS)


def test_nothing_is_promised_of_a_run_whose_rest_is_not_known() -> None:
    died = training_run(batch=1024, layers=12)
    assert larger_card_words(died, "b200") == "a larger card: the b200 gets past that line"
    assert "--gpu all" in words(died, Advice(), alone=True)
    assert words(died, Advice()) == ""
    assert died.oom
    died.oom = replace(died.oom, requested_bytes=2**47)
    assert "no card will ever hold that one tensor" in words(died, Advice())


def test_explain_and_the_page_say_the_same(recording: Recording) -> None:
    found = diagnose(recording)
    assert found.total and found.larger_card
    lines = [line.plain for section in diagnosis_sections(recording, found, verbose=False) for line in section]
    assert any("in all" in line for line in lines)
    assert any("holds the whole run" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert explain_figures(recording, found)["total"]["needed_bytes"] == found.total.needed_bytes  # type: ignore[index]
    page = advice_section(recording, Advice(found.fixes, found.larger_card, total=found.total))
    assert "in all" in page and "the whole run fits with it" in page

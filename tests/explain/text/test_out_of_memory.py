"""Texts of errors of many frameworks (`data/out_of_memory.toml`): advice in sentences, no wrong phase, no wrong certainty."""

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tonnage.explain.text import TextDiagnosis, explain_text
from tonnage.report.runs.explain import print_text_diagnosis, text_figures

TEXTS = tomllib.loads((Path(__file__).parent / "data/out_of_memory.toml").read_text("utf-8"))["texts"]
NAMES = [f"{row['framework']}: {row['name']}" for row in TEXTS]
UNKNOWN = "unknown"


def explained(row: dict[str, Any]) -> TextDiagnosis:
    return explain_text(row["text"].splitlines())


def printed(found: TextDiagnosis) -> list[str]:
    stream = io.StringIO()
    print_text_diagnosis("error.txt", found, stream=stream, verbose=True)
    return stream.getvalue().splitlines()


def test_there_are_a_hundred_texts_of_ten_frameworks() -> None:
    assert len(TEXTS) >= 100 and len({row["framework"] for row in TEXTS}) >= 10
    assert len({row["text"] for row in TEXTS}) == len(set(NAMES)) == len(TEXTS)


@pytest.mark.parametrize("row", TEXTS, ids=NAMES)
def test_advice_is_in_sentences_and_fits_the_terminal(row: dict[str, Any]) -> None:
    found = explained(row)
    assert found.steps
    for step in found.steps:
        assert len(step.split()) > 1 and max(map(len, step.split())) > 3, step
    assert max(map(len, printed(found))) <= 80


@pytest.mark.parametrize("row", TEXTS, ids=NAMES)
def test_no_wrong_phase_is_stated_and_no_wrong_cause_is_certain(row: dict[str, Any]) -> None:
    found = explained(row)
    assert (found.place.phase or UNKNOWN) == row["phase"]
    assert found.first.cause == row["cause"]
    assert {one.cause for one in found.causes if one.certainty == "certain"} <= {row["cause"]}


@pytest.mark.parametrize("row", TEXTS, ids=NAMES)
def test_json_and_the_report_say_the_same(row: dict[str, Any]) -> None:
    found = explained(row)
    figures: dict[str, Any] = json.loads(json.dumps(text_figures(found)))
    report = " ".join(" ".join(printed(found)).split())
    assert figures["cause"] == found.first.cause
    assert f"{figures['cause']}, {figures['certainty']}" in report
    assert (figures["phase"] or UNKNOWN) == row["phase"]
    assert figures["phase"] is None or f"in {figures['phase']}" in report
    numbered = " ".join(f"{number} {step}" for number, step in enumerate(figures["steps"], 1))
    assert report.replace(" ", "").endswith(numbered.replace(" ", ""))
    for cause in figures["causes"]:
        assert cause["sentence"].replace(" ", "") in report.replace(" ", "")

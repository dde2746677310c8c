"""The time of a step as text: its sentence, its kinds, and launches in few bytes."""

import gzip
import json
import re
from base64 import b64decode
from itertools import accumulate
from random import Random

import pytest

from hostile_recordings import HOSTILE
from html_tags import Tags
from step_times import step_of, step_with
from support import training_run
from tonnage.clock.step import SteadyStep
from tonnage.clock.timeline import Span
from tonnage.report.html import render_page
from tonnage.report.html.step import MOST_STREAMS, spans_of
from tonnage.report.html.step import sentence as sentence_of


def page_of(time: SteadyStep | None) -> str:
    recording = training_run()
    recording.step_time = time
    return render_page(recording)


def spans_in(page: str) -> dict:
    packed = re.search(r'id="spans">(.*?)</script>', page)[1]
    return json.loads(gzip.decompress(b64decode(packed)))


def test_the_section_stands_above_the_memory_s_chart() -> None:
    time = step_of(20)
    page = page_of(time)
    assert page.index('id="step-time"') < page.index('id="timeline"')
    assert sentence_of(time) in page
    kinds = re.search(r'id="step-kinds".*?</ul>', page)[0]
    assert [kind in kinds for kind in time.time_by_kind] == [True] * len(time.time_by_kind)


def test_without_a_captured_step_nothing_is_shown() -> None:
    page = page_of(None)
    assert "The time of a step" not in page and 'id="spans"' not in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({}, "A step takes about 412 ms on the h200 (388 to 440 ms), 39,800 tokens/s, 41 % of its peak"),
        ({"tokens": None}, "A step takes about 412 ms on the h200 (388 to 440 ms), 38.8 samples/s, 41 % of its peak"),
        ({"samples": None, "tokens": None, "rate": 0.0}, "A step takes about 412 ms on the h200 (388 to 440 ms)"),
        (
            {"high_s": 1.044},
            "A step takes about 412 ms on the h200 (388 ms to 1.04 s), 39,800 tokens/s, 41 % of its peak",
        ),
    ],
)
def test_the_sentence(words: dict, sentence: str) -> None:
    values = {"low_s": 0.388, "high_s": 0.440, "tokens": 16384, "samples": 16, "operations": 0.412 * 0.41, "rate": 1.0}
    time = step_with(Span("mm", "matmul", 0, 0.0, 0.412), step_s=0.412, **(values | words))
    assert sentence_of(time) == sentence


def test_launches_are_where_they_were() -> None:
    time = step_of(50, copies=True)
    found = spans_in(page_of(time))
    assert [stream["stream"] for stream in found["streams"]] == [0, 7]
    for stream in found["streams"]:
        own = [span for span in time.timeline.spans if span.stream == stream["stream"]]
        ends = list(accumulate(gap + length for gap, length in zip(stream["gaps"], stream["lengths"], strict=True)))
        assert ends == [round(span.end_s * 1e7) for span in own]
        assert [found["labels"][label][:2] for label in stream["label"]] == [[span.name, span.kind] for span in own]


def test_a_step_of_20_000_launches_is_small() -> None:
    chance = Random(1)
    spans = [
        Span(f"op{chance.randrange(60)}", "elementwise", 0, at * 1e-4, at * 1e-4 + chance.uniform(1e-6, 9e-5))
        for at in range(20_000)
    ]
    assert len(page_of(step_with(*spans, step_s=2.0))) - len(page_of(None)) < 250_000


def test_what_is_too_much_is_left_out_and_counted() -> None:
    spans = [Span("mm", "matmul", at % 40, at * 1e-5, at * 1e-5 + 1e-6) for at in range(4000)]
    found = spans_of(spans, 0.04, most=2000)
    assert len(found["streams"]) == MOST_STREAMS
    assert found["left_out"] == 4000 - sum(len(stream["gaps"]) for stream in found["streams"]) > 2000


def test_names_and_kinds_of_a_recording_are_words_and_never_markup() -> None:
    page = page_of(step_with(Span(HOSTILE, HOSTILE, 0, 0.0, 0.01), Span("\ud800", "matmul", 0, 0.01, 0.02)))
    page.encode("utf-8")
    assert "&lt;img" in page and not [tag for tag, _ in Tags(page).found if tag == "img"]
    assert spans_in(page)["labels"][0][2] == "other"


def test_a_step_that_launches_nothing_has_no_chart() -> None:
    page = page_of(step_with())
    assert "waiting for the host" in page and 'id="step-chart"' not in page

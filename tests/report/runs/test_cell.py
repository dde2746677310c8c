import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import chromium
from chromium import Browser
from support import Run, climbing_run, training_run
from tonnage.ledger import Category
from tonnage.report.html.markup import colours
from tonnage.report.runs.cell import cell_html, cell_text
from tonnage.units import format_bytes


class Words(HTMLParser):
    """What a reader sees, and which elements there are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.elements = "", set[str]()
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)


def test_the_numbers_are_the_recording_s() -> None:
    recording = training_run()
    words = Words(cell_html(recording)).text
    assert f"allocated {format_bytes(recording.peak_allocated_bytes)}" in words
    assert "fits" in words
    for category, size_bytes in recording.ledger().ranked():
        assert f"{category.label} {format_bytes(size_bytes)}" in words
    assert "half the batch" in words
    assert "to save memory" in words


def test_a_run_that_died_says_where() -> None:
    words = Words(cell_html(training_run(gpu="t4", batch=64))).text
    assert "does not fit" in words
    assert "out of memory in forward at" in words
    assert "train.py:87" in words


def test_names_cannot_bring_html_of_their_own() -> None:
    evil = '<script>alert("x")</script>'
    run = Run(gpu_name=evil)
    run.phase("forward")
    run.alloc(2**20, Category.ACTIVATIONS, operator=evil, module=evil, line=f"{evil}:1", dtype=evil, shape=(1,))
    found = Words(cell_html(run.recording))
    assert "script" not in found.elements
    assert evil in found.text


def test_it_is_well_formed_and_loads_nothing() -> None:
    html = cell_html(training_run())
    ElementTree.fromstring(html.replace("<br>", "<br/>").replace("<wbr>", "<wbr/>"))
    assert not re.search(r"https?:|<script|<link|<img", html)


def test_without_an_allocation_it_says_so() -> None:
    assert "nothing was allocated" in cell_html(Run().recording)


def test_the_text_is_the_terminal_s_report() -> None:
    assert "largest at the peak" in cell_text(training_run())


def test_the_chart_has_the_page_s_colours_and_its_steps() -> None:
    recording = training_run(steps=3)
    html = cell_html(recording)
    for category, _ in recording.ledger().ranked():
        assert f'fill="{colours()[str(category)]}"' in html and f"background:{colours()[str(category)]}" in html
    assert re.findall(r">(step \d)</text>", html) == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize("steps", [1, 40])
def test_the_chart_of_few_columns_keeps_the_peak(steps: int) -> None:
    recording = training_run(steps=steps)
    lowest = min(
        float(y) for y in re.findall(r",([\d.]+)", re.findall(r'<polygon points="([^"]*)"', cell_html(recording))[-1])
    )
    assert lowest == pytest.approx(120 * (1 - recording.peak_allocated_bytes / recording.peak_reserved_bytes), abs=0.1)


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_it_is_no_wider_than_a_narrow_notebook_and_its_words_keep_their_width(tmp_path: Path) -> None:
    run = Run()
    module = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.default"
    run.alloc(
        2**26, Category.ACTIVATIONS, shape=(4, 1024, 5632), dtype="bfloat16", module=module, line="fine_tune.py:39"
    )
    page = tmp_path / "cell.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{cell_html(run.recording)}")
    with Browser(420, 900) as browser:
        browser.open(page)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 420
        assert browser.evaluate("Math.max(...[...document.querySelectorAll('tr')].map(r => r.clientHeight))") < 150


def test_a_cell_whose_steps_climb_says_so() -> None:
    for words in (Words(cell_html(climbing_run())).text, cell_text(climbing_run())):
        assert "fits so far, but climbs" in words
        assert "the steps climb by 64.00 MiB each" in words

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from support import Run, training_run
from tonnage.ledger import Category
from tonnage.report.cell import _peaks, cell_html, cell_text
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
    ElementTree.fromstring(html.replace("<br>", "<br/>"))
    assert not re.search(r"https?:|<script|<link|<img", html)


def test_without_an_allocation_it_says_so() -> None:
    assert "nothing was allocated" in cell_html(Run().recording)


def test_the_text_is_the_terminal_s_report() -> None:
    assert "largest at the peak" in cell_text(training_run())


@given(values=st.lists(st.integers(0, 2**40), min_size=1, max_size=2000))
def test_a_timeline_of_few_columns_keeps_the_peak(values: list[int]) -> None:
    columns = _peaks(values)
    assert len(columns) <= 240
    assert max(columns) == max(values)

"""A cluster's page in a real headless Chromium: it opens offline, draws every rank, and unpacks the report of each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
from chromium import Browser
from clusters import hostile_cluster, one_dies, one_odd
from tonnage.recording import ClusterRecording
from tonnage.report.html import render_cluster_page
from tonnage.report.output import write_text
from tonnage.report.runs.odd_ranks import compare_ranks

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)

READABLE = 4.5
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
UNPACKED = "new Promise(done => { const wait = () => frame.dataset.rank ? done(1) : setTimeout(wait, 20); wait(); })"
INSIDE = "frame.contentDocument"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, tmp_path: Path):
    """A cluster, as a page, in the browser; at the end nothing but the page was fetched and nothing complained."""
    page = tmp_path / "report.html"

    def show(cluster: ClusterRecording) -> Browser:
        write_text(page, render_cluster_page(cluster))
        browser.requests.clear()
        browser.complaints.clear()
        browser.open(page)
        return browser

    yield show
    browser.evaluate("location.hash = ''")
    assert {request.partition("#")[0] for request in browser.requests} == {page.as_uri()}
    assert browser.complaints == []


def open_report(browser: Browser, rank: int) -> None:
    browser.evaluate(f"document.querySelector('#tabs [data-report=\"{rank}\"]').click()")
    browser.settle()
    browser.evaluate(UNPACKED)
    browser.settle()


def test_bars_are_as_long_as_what_ranks_hold(opened) -> None:
    cluster = one_odd()
    browser = opened(cluster)
    widths = browser.evaluate(
        "[...document.querySelectorAll('.rank-bar')].map(bar => [...bar.querySelectorAll('rect')]"
        ".reduce((sum, box) => sum + box.getBoundingClientRect().width, 0))"
    )
    held = [kind.process_bytes for kind in compare_ranks(cluster.summary).kinds]
    assert widths[1] / widths[0] == pytest.approx(held[1] / held[0], rel=0.01)


def test_the_odd_one_is_seen_and_its_line_is_drawn(opened) -> None:
    browser = opened(one_odd())
    assert browser.evaluate("[...document.querySelectorAll('.is-odd')].map(row => row.id)") == ["rank-7"]
    assert "odd one out" in browser.evaluate("lines.textContent")
    count = """
    (() => {
      const wanted = colour("odd").match(/[0-9a-f]{2}/g).map((v) => parseInt(v, 16));
      const pixels = plot.getContext("2d").getImageData(0, 0, plot.width, plot.height).data;
      let found = 0;
      for (let at = 0; at < pixels.length; at += 4) found += wanted.every((v, n) => Math.abs(v - pixels[at + n]) < 3);
      return found;
    })()
    """
    assert browser.evaluate(count) > 500


def test_a_line_is_read_by_pointing_and_by_choosing(opened) -> None:
    cluster = one_odd()
    browser = opened(cluster)
    assert "ranks 0–6" not in browser.evaluate("readout.textContent")
    browser.evaluate("lines.querySelector('button').click()")
    browser.settle()
    bytes_read = "Number(readout.querySelector('[data-bytes]').dataset.bytes)"
    assert "ranks 0–6" in browser.evaluate("readout.textContent")
    assert browser.evaluate(bytes_read) == cluster.recording_of(0).peak_allocated_bytes
    browser.evaluate("document.querySelector('[data-level=reserved]').click()")
    browser.settle()
    assert browser.evaluate(bytes_read) == cluster.recording_of(0).peak_reserved_bytes
    x, y = browser.evaluate(
        "(() => { plot.scrollIntoView({block: 'center'}); const r = plot.getBoundingClientRect();"
        "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
    )
    browser.hover(x, y)
    assert "step " in browser.evaluate("readout.textContent")
    browser.hover(1, 1)


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_s_report_is_unpacked_and_works(opened, rank: int) -> None:
    cluster = one_odd()
    browser = opened(cluster)
    open_report(browser, rank)
    recording = cluster.recording_of(rank)
    read = f"[...{INSIDE}.querySelectorAll('.tiles [data-bytes]')].map(n => Number(n.dataset.bytes))"
    peaks = [recording.peak_allocated_bytes, recording.peak_reserved_bytes, recording.peak_process_bytes]
    assert browser.evaluate(read)[:3] == peaks
    assert browser.evaluate(f"{INSIDE}.getElementById('pieces').children.length") > 3
    assert browser.evaluate(f"{INSIDE}.getElementById('readout').textContent").startswith("event ")
    assert browser.evaluate("[overview.hidden, report.hidden]") == [True, False]


def test_from_a_report_back_to_all_ranks_by_the_tab_and_by_the_address(opened) -> None:
    browser = opened(one_odd())
    open_report(browser, 7)
    assert browser.evaluate("location.hash") == "#report-7"
    pressed = "document.querySelector('#tabs [aria-pressed=true]').textContent.trim()"
    assert browser.evaluate(pressed).startswith("rank 7")
    browser.evaluate("document.querySelector('#tabs button').click()")
    browser.settle()
    assert browser.evaluate("[overview.hidden, report.hidden]") == [False, True]
    browser.evaluate("location.hash = 'report-0'")
    browser.settle()
    browser.evaluate(UNPACKED)
    assert browser.evaluate(pressed) == "ranks 0–6"
    browser.evaluate("location.hash = 'report-5000'")
    browser.settle()
    assert browser.evaluate(pressed) == "all ranks"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("make", [one_odd, one_dies])
def test_it_reads_well(opened, scheme: str, make) -> None:
    browser = opened(make())
    browser.prefer(scheme)
    contrast, where = browser.evaluate(
        CONTRAST.replace("#legend li", ".legend li, .legend button, .badge, .over, .who")
    )
    assert contrast >= READABLE, where
    assert len(browser.picture()) > 20_000


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_the_page_is_no_wider_than_its_window(opened, browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    opened(one_odd())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    open_report(browser, 7)
    assert browser.evaluate(f"{INSIDE}.documentElement.scrollWidth") <= width
    browser.resize(1200, 900)


def test_a_hostile_cluster_harms_nothing(opened) -> None:
    browser = opened(hostile_cluster())
    open_report(browser, 0)
    assert browser.evaluate("[window.harmed, frame.contentWindow.harmed]") == [None, None]
    assert browser.evaluate("document.querySelectorAll('img, object, link').length") == 0
    assert browser.evaluate(f"{INSIDE}.querySelectorAll('img, iframe, object, link').length") == 0


def test_a_report_that_is_more_than_ours_does_not_run(browser: Browser, tmp_path: Path) -> None:
    """The policy of the page around it holds within the frame, should the packed page be another."""
    page = tmp_path / "report.html"
    write_text(page, render_cluster_page(one_odd()))
    browser.open(page)
    browser.complaints.clear()
    browser.evaluate("frame.srcdoc = '<script>parent.harmed = 1</' + 'script>'")
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    assert browser.evaluate("window.harmed") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
    browser.complaints.clear()

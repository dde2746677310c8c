"""The time of a step in a real headless Chromium: its launches are drawn, named, zoomed and read well."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
from chromium import Browser
from hostile_recordings import HOSTILE
from step_times import step_of, step_with
from support import training_run
from tonnage.clock.step import SteadyStep
from tonnage.clock.timeline import Span
from tonnage.report.html import render_page
from tonnage.report.output import write_text

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
PAINTED = """
((names) => {
  const canvas = document.getElementById("step-plot");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return names.map((name) => {
    const wanted = colour(`c-${name}`).match(/[0-9a-f]{2}/g).map((v) => parseInt(v, 16));
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4) found += wanted.every((v, n) => Math.abs(v - pixels[at + n]) < 3);
    return found;
  });
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, tmp_path: Path):
    """A step, on its page, in the browser; at the end nothing was fetched and nothing complained."""
    page = tmp_path / "report.html"

    def show(time: SteadyStep) -> Browser:
        recording = training_run()
        recording.step_time = time
        write_text(page, render_page(recording))
        browser.requests.clear()
        browser.complaints.clear()
        browser.open(page)
        browser.evaluate("stepShown.then(() => 1)")
        browser.settle()
        return browser

    yield show
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []


def plot_box(browser: Browser) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of what is plotted, in the window."""
    return tuple(
        browser.evaluate(
            "(() => { const plot = document.getElementById('step-plot'); plot.scrollIntoView({block: 'center'});"
            "const r = plot.getBoundingClientRect(); return [r.left + EDGE.left, r.right - 8, r.top, r.bottom]; })()"
        )
    )


def view(browser: Browser) -> tuple[float, float]:
    found = browser.evaluate(
        "(({dataset}) => [dataset.from, dataset.to].map(Number))(document.getElementById('step-chart'))"
    )
    return found[0], found[1]


def place(browser: Browser, time: SteadyStep, moment_s: float) -> float:
    left, right, _, _ = plot_box(browser)
    return left + (right - left) * moment_s / time.step_s


def tip(browser: Browser) -> str:
    return browser.evaluate("document.getElementById('step-tip').innerText")


def test_launches_and_gaps_are_painted_in_their_colours(opened) -> None:
    browser = opened(step_of(6, host_s=300e-6))
    painted = browser.evaluate(f"{PAINTED}(['matmul', 'attention', 'optimizer', 'waiting'])")
    assert min(painted) > 500, painted


def test_the_pointer_names_a_kernel_its_kind_and_its_time(opened) -> None:
    time = step_with(Span("mm", "matmul", 0, 0.001, 0.005), Span("gelu", "elementwise", 0, 0.006, 0.0061))
    browser = opened(time)
    _, _, top, _ = plot_box(browser)
    browser.hover(place(browser, time, 0.003), top + 30)
    assert tip(browser).split() == "4.00 ms mm matmul · stream 0 1.00 ms into the step".split()
    browser.hover(place(browser, time, 0.0055), top + 30)
    assert tip(browser).split() == "1.00 ms waiting for the host 5.00 ms into the step".split()
    browser.hover(place(browser, time, 0) - 30, top)
    assert browser.evaluate("document.getElementById('step-tip').hidden") is True


def test_launches_narrower_than_a_pixel_are_drawn_and_counted_together(opened) -> None:
    time = step_of(2_000)
    browser = opened(time)
    assert browser.evaluate(f"{PAINTED}(['matmul'])")[0] > 5000
    left, right, top, _ = plot_box(browser)
    browser.hover((left + right) / 2, top + 30)
    assert "240 µs" in tip(browser) and "shorter ones in this pixel" in tip(browser)


def test_streams_have_a_row_each(opened) -> None:
    time = step_of(12, copies=True)
    browser = opened(time)
    _, _, top, bottom = plot_box(browser)
    span = next(span for span in time.timeline.spans if span.stream == 7)
    x = place(browser, time, (span.start_s + span.end_s) / 2)
    browser.hover(x, bottom - 40)
    assert "copy · stream 7" in tip(browser)
    browser.hover(x, top + 10)
    assert "stream 0" in tip(browser)


def test_it_zooms_by_dragging_keys_and_the_strip_and_comes_back(opened) -> None:
    time = step_of(50)
    browser = opened(time)
    whole = view(browser)
    assert whole == (0, pytest.approx(time.step_s * 1e7, abs=1))
    left, right, top, _ = plot_box(browser)
    browser.drag((left + (right - left) * 0.25, top + 30), (left + (right - left) * 0.75, top + 30))
    narrow = view(browser)
    assert narrow == (pytest.approx(whole[1] / 4, rel=0.01), pytest.approx(whole[1] * 3 / 4, rel=0.01))
    browser.evaluate("document.getElementById('step-chart').focus()")
    browser.press("ArrowRight")
    assert view(browser)[0] == pytest.approx(narrow[0] + 0.1 * (narrow[1] - narrow[0]))
    browser.press("+")
    assert view(browser)[1] - view(browser)[0] == pytest.approx((narrow[1] - narrow[0]) / 2)
    browser.press("Home")
    assert view(browser) == whole
    height = browser.evaluate(
        "(() => { const r = document.getElementById('step-overview').getBoundingClientRect(); return (r.top + r.bottom) / 2; })()"
    )
    browser.drag((right, height), ((left + right) / 2, height))
    assert view(browser) == (0, pytest.approx(whole[1] / 2, rel=0.01))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_well(opened, scheme: str) -> None:
    browser = opened(step_of(20))
    browser.prefer(scheme)
    contrast, where = browser.evaluate(CONTRAST)
    assert contrast >= 4.5, where


@pytest.mark.parametrize("width", [320, 400, 1400])
def test_the_page_is_no_wider_than_its_window(opened, browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    time = step_of(20, copies=True)
    opened(time)
    left, right, top, _ = plot_box(browser)
    for x in (left + 1, right - 1):
        browser.hover(x, top + 20)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert tip(browser)
        edges = browser.evaluate(
            "(({left, right}) => [left, right])(document.getElementById('step-tip').getBoundingClientRect())"
        )
        assert edges[0] >= 0 and edges[1] <= width
    browser.resize(1200, 900)


def test_hostile_names_harm_nothing(opened) -> None:
    browser = opened(step_with(Span(HOSTILE, HOSTILE, 0, 0.0, 0.02)))
    left, right, top, _ = plot_box(browser)
    browser.hover((left + right) / 2, top + 20)
    assert "<img" in tip(browser)
    assert browser.evaluate("window.harmed") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_20_000_launches_open_fast_and_answer_at_once(opened) -> None:
    browser = opened(step_of(5_000))
    assert browser.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 2000
    drawing = """
    stepShown.then((step) => {
      const plot = document.getElementById("step-plot"), began = performance.now();
      for (let turn = 0; turn < 10; turn += 1) drawStep(plot, step, { from: 0, to: step.length }, null, null);
      return (performance.now() - began) / 10;
    })
    """
    assert browser.evaluate(drawing) < 50

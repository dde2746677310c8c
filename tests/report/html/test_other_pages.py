"""The pages of diff, explain and plans: their figures, nothing to fetch, nothing wider than its window, readable."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
from chromium import Browser
from hostile_recordings import hostile_recording
from html_tags import Tags
from support import training_run
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.explain import compare, diagnose
from tonnage.explain.diff import GrowthLimit
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.rl.search import RlRequest, plan_rl
from tonnage.planner.serving.search import plan_serving
from tonnage.planner.training.offers import offers
from tonnage.planner.training.reasons import rejected
from tonnage.planner.training.remedies import next_plan, remedies
from tonnage.planner.training.request import TrainingRequest
from tonnage.planner.training.search import search
from tonnage.report.html import render_page
from tonnage.report.html.diff_page import render_diff_page
from tonnage.report.html.plan_page import render_plan_page, render_rl_page, render_serving_page
from tonnage.report.plans.training import TrainingAnswer
from tonnage.report.runs.diff import ComparedRuns

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def diff_page(limit: str = "") -> str:
    runs = (training_run(batch=4), training_run(batch=8, layers=6))
    asked = GrowthLimit.parse(limit) if limit else None
    return render_diff_page(ComparedRuns(("a.tonnage", "b.tonnage"), runs, compare(*runs), asked, failed=bool(limit)))


def explain_page() -> str:
    recording = training_run(gpu="t4", batch=64)
    return render_page(recording, diagnosis=diagnose(recording))


def plan_page(model: str, gpus: str) -> str:
    findings = search(find_model(model), find_cluster(gpus), TrainingRequest(seq=4096))
    changes = [] if findings.fits else remedies(findings)
    following = next_plan(findings, changes)
    answer = TrainingAnswer(findings, rejected(findings), changes, offers(findings), next_plan=following)
    return render_plan_page(answer)


def serving_page(gpus: str) -> str:
    asked = ServingConfiguration(context=8192, users=16)
    return render_serving_page(
        plan_serving(find_model("llama-3.1-8b"), find_cluster(gpus), asked, model="llama-3.1-8b")
    )


def rl_page(gpus: str) -> str:
    training = TrainingRequest(seq=1, tp=1, pp=1, cp=1)
    return render_rl_page(plan_rl(find_model("qwen2.5-7b"), find_cluster(gpus), RlRequest(training=training)))


PAGES = {
    "diff": diff_page,
    "explain": explain_page,
    "plan": lambda: plan_page("llama-3.1-8b", "8xh200"),
    "plan that does not fit": lambda: plan_page("llama-3.1-70b", "rtx-4090"),
    "serve": lambda: serving_page("h200"),
    "serve that does not fit": lambda: serving_page("t4"),
    "rl": lambda: rl_page("8xh100"),
    "rl that does not fit": lambda: rl_page("rtx-4090"),
}


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def test_nothing_is_fetched(page: str) -> None:
    assert not re.search(r"\bsrc=|href=|url\(|@import|\bfetch\(", page)
    assert "default-src 'none'" in page


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_it_opens_fits_its_window_and_reads_well(browser: Browser, page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    browser.requests.clear()
    browser.complaints.clear()
    for width in (420, 800, 1400):
        browser.resize(width, 900)
        browser.open(file)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        contrast, where = browser.evaluate(CONTRAST)
        assert contrast >= 4.5, where
    assert set(browser.requests) == {file.as_uri()} and browser.complaints == []


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_a_phone_shows_what_grew_without_scrolling(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(diff_page(), encoding="utf-8")
    browser.resize(400, 900)
    browser.open(file)
    ends = (
        "Math.max(...[...document.querySelectorAll('.growths [data-bytes]')].map(e => e.getBoundingClientRect().right))"
    )
    assert 0 < browser.evaluate(ends) <= 400


# Cells whose words do not lie within the window or within the part of their table that is seen.
CLIPPED = """
[...document.querySelectorAll("td, th")].filter((n) => n.checkVisibility() && n.textContent).flatMap((n) => {
  const where = document.createRange(), seen = n.closest(".scroll")?.getBoundingClientRect();
  where.selectNodeContents(n);
  const words = where.getBoundingClientRect();
  const right = Math.min(innerWidth, seen ? seen.right : innerWidth) + 0.5;
  return words.left < 0 || words.right > right ? [[n.textContent, words.left, words.right, right]] : [];
})
"""


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
@pytest.mark.parametrize("width", [400, 1200])
def test_no_cell_is_clipped(browser: Browser, page: str, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    browser.resize(width, 900)
    browser.open(file)
    browser.evaluate("document.querySelectorAll('details').forEach((each) => each.setAttribute('open', ''))")
    assert browser.evaluate(CLIPPED) == []


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_what_a_layout_lacks_is_seen_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    found = plan_serving(
        find_model("llama-3.1-70b"), find_cluster("4xh100"), ServingConfiguration(context=32768, users=64)
    )
    file = tmp_path / "page.html"
    file.write_text(render_serving_page(found), encoding="utf-8")
    browser.resize(400, 900)
    browser.open(file)
    assert browser.evaluate(CLIPPED) == []
    cells = browser.evaluate("[...document.querySelectorAll('#layouts td:last-child')].map(n => n.innerText)")
    assert cells and all(cell.startswith("lacks ") and cell.endswith(" GiB") for cell in cells)


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
@pytest.mark.parametrize("width", [400, 1200])
def test_the_peak_s_words_cover_no_others(browser: Browser, tmp_path: Path, width: int) -> None:
    """Whether or not it died, wherever the card's limit lies above the peak, and wherever the peak lies in time."""
    for name, recording in (("died", training_run(gpu="t4", batch=64)), ("fits", training_run(steps=3))):
        file = tmp_path / f"{name}.html"
        file.write_text(render_page(recording), encoding="utf-8")
        browser.resize(width, 900)
        browser.open(file)
        crossed = browser.evaluate("""
            (() => {
              const found = [], peak = run.allocated[pointAt(run.peak)];
              for (let more = 0; more <= 30; more += 1) for (const part of [1, 0.7, 0.4]) {
                run.ceiling = peak * (1 + more / 50);
                const to = Math.max(run.events * part, run.peak + 1);
                const { words } = drawPlot(plot, { from: 0, to }, null, null, null);
                words.forEach((one, at) => words.slice(at + 1).forEach((other) => {
                  const apart = one.left >= other.right || other.left >= one.right || one.top >= other.bottom;
                  if (!apart && other.top < one.bottom) found.push([more, part, one, other]);
                }));
                if (words.length < 2) found.push([more, part, "no words"]);
              }
              return found;
            })()
        """)
        assert crossed == []


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_a_flag_is_not_broken_after_its_hyphens(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(serving_page("h200"), encoding="utf-8")
    browser.resize(400, 900)
    browser.open(file)
    heights = "[...new Set([...document.querySelectorAll('#launch pre span')].map(e => Math.round(e.offsetHeight)))]"
    assert len(browser.evaluate(heights)) == 1
    assert browser.evaluate("document.querySelector('#launch pre').innerText").startswith("vllm serve ")


def test_a_diff_has_every_growth_and_both_lines() -> None:
    page = diff_page()
    difference = compare(training_run(batch=4), training_run(batch=8, layers=6))
    for growth in (*difference.categories, *difference.lines):
        assert f'data-bytes="{growth.grew_bytes}"' in page
    assert "a.tonnage → b.tonnage" in page and '"name":"A  a.tonnage"' in page
    assert "Grew by more than 5%" in diff_page("5%")


def test_a_diff_of_hostile_recordings_is_words() -> None:
    runs = (training_run(), hostile_recording())
    page = render_diff_page(ComparedRuns(("<b>a", "b"), runs, compare(*runs)))
    assert {tag for tag, _ in Tags(page).found} <= {tag for tag, _ in Tags(diff_page()).found} | {"details", "summary"}
    assert "<b>a" not in page


def test_an_explanation_stands_above_the_chart() -> None:
    recording = training_run(gpu="t4", batch=64)
    found, page = diagnose(recording), explain_page()
    assert found.cause in page and page.index('id="cause"') < page.index('id="fixes"') < page.index('id="chart"')
    for finding in found.evidence:
        assert f'data-bytes="{finding.size_bytes}"' in page


def test_a_plan_says_its_ledger_and_what_would_fit() -> None:
    findings = search(find_model("llama-3.1-8b"), find_cluster("8xh200"), TrainingRequest(seq=4096))
    page = PAGES["plan"]()
    for _, size in findings.closest.ledger.ranked():
        assert f'data-bytes="{size}"' in page
    assert f"{findings.closest.tokens_per_s:,.0f}" in page and "Term by term" in page
    failed = PAGES["plan that does not fit"]()
    assert "does not fit" in failed and 'id="remedies"' in failed


def test_a_serving_plan_says_how_to_launch_it_or_what_would_fit() -> None:
    assert "<span>vllm</span> <span>serve</span>" in PAGES["serve"]() and "most users" in PAGES["serve"]()
    assert "What would fit" in PAGES["serve that does not fit"]()

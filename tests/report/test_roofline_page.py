"""The page is read as XML and, where there is one, opened in a headless Chromium."""

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

import chromium
from chromium import Browser
from tonnage.clock.operators import Work
from tonnage.hardware import find_gpu
from tonnage.models import find_model
from tonnage.report.roofline_page import HEIGHT, WIDTH, roofline_page
from tonnage.roofline import Analysis, analyse, catalogue_ceilings, model_profile, read_profile
from tonnage.roofline.items import Item, RooflineProfile

DATA = Path(__file__).parents[1] / "roofline" / "data"
H200 = catalogue_ceilings(find_gpu("h200"))


def analyses() -> dict[str, Analysis]:
    profiles = {
        "ncu": read_profile(DATA / "ncu.csv.gz"),
        "trace": read_profile(DATA / "step.json.gz"),
        "model": model_profile(find_model("llama-3.1-8b"), "train", batch=1, seq=4096),
    }
    return {name: analyse(profile, H200) for name, profile in profiles.items()}


@pytest.fixture(scope="module", params=["ncu", "trace", "model"])
def analysis(request: pytest.FixtureRequest) -> Analysis:
    return analyses()[request.param]


def plot(analysis: Analysis) -> ElementTree.Element:
    found = re.search(r"<svg.*?</svg>", roofline_page(analysis), re.DOTALL)
    assert found
    return ElementTree.fromstring(found[0])


def test_nothing_is_fetched(analysis: Analysis) -> None:
    page = roofline_page(analysis)
    assert not re.search(r"https?:|\bsrc=|href=|url\(|@import", page)
    assert page.count("<script") == 1 and "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_every_mark_is_within_the_plot_and_says_what_it_is(analysis: Analysis) -> None:
    marks = [group for group in plot(analysis).iter("g") if group.get("class", "").startswith("mark")]
    assert len(marks) > 5
    for mark in marks:
        title, shape = list(mark)
        assert "-bound" in (title.text or "") or "unknown" in (title.text or "")
        x, y = (float(shape.get(key, shape.get(f"c{key}", "0"))) for key in "xy")
        assert -20 <= x <= WIDTH and -20 <= y <= HEIGHT


def test_every_row_is_in_the_table(analysis: Analysis) -> None:
    assert roofline_page(analysis).count("<td title=") == len(analysis.rows)


def test_a_roof_for_each_precision_in_use() -> None:
    words = [text.text for text in plot(analyses()["trace"]).iter("text") if text.get("class") == "roof"]
    assert words == ["memory 4.80 TB/s", "fp32 67 TFLOP/s", "bf16 989 TFLOP/s"]


def test_the_name_of_a_lower_roof_is_below_it_for_above_goes_the_slope() -> None:
    picture = plot(analyses()["trace"])
    name = next(text for text in picture.iter("text") if text.text == "fp32 67 TFLOP/s")
    roofs = [line for line in picture.iter("line") if line.get("class") == "roof" and line.get("y1") == line.get("y2")]
    assert float(name.get("y", 0)) > max(float(roof.get("y1", 0)) for roof in roofs)


def test_long_names_keep_their_end() -> None:
    words = [text.text or "" for text in plot(analyses()["trace"]).iter("text") if text.get("class") == "name"]
    assert "native_layer_norm_backward" in words and not any(word.endswith("…") for word in words)


def test_marks_lie_on_or_below_their_roof() -> None:
    """SVG's y grows downwards: nothing of a model's best case is above its bound."""
    drawn = plot(analyses()["model"])
    highest = min(float(line.get("y2", 0)) for line in drawn.iter("line") if line.get("class") == "roof")
    centres = [float(circle.get("cy", 0)) for circle in drawn.iter("circle")]
    centres += [float(box.get("y", 0)) + float(box.get("height", 0)) / 2 for box in drawn.iter("rect")]
    assert centres and min(centres) >= highest - 0.1


def test_names_are_escaped() -> None:
    hostile = Item(name="<script>alert(1)</script>", detail='"&', seconds=1e-3, work=Work(1e9, 1e9), kernels=('"><b>',))
    page = roofline_page(analyse(RooflineProfile(kind="torch-profiler", source="<i>", items=(hostile,)), H200))
    assert "<script>alert" not in page and "<i>" not in page and "<b>" not in page


def test_rows_without_a_place_make_no_plot() -> None:
    nothing = Item(name="fill_", seconds=1e-3, work=Work(0.0, 1e9))
    page = roofline_page(analyse(RooflineProfile(kind="torch-profiler", source="by hand", items=(nothing,)), H200))
    assert "<svg" not in page and "fill_" in page


LABELS = """
[...document.querySelectorAll("svg text.roof, svg text.name")].filter((n) => n.checkVisibility()).map((n) => {
  const r = n.getBoundingClientRect();
  return [n.textContent, r.left, r.top + 3, r.right, r.bottom - 3];
})
"""


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
@pytest.mark.parametrize("width", [420, 800, 1400])
def test_labels_do_not_collide_and_nothing_overflows(tmp_path: Path, analysis: Analysis, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(roofline_page(analysis), encoding="utf-8")
    with Browser(width, 900) as browser:
        browser.open(page)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        labels = browser.evaluate(LABELS)
        assert len(labels) >= 2
        for (first, *a), (second, *b) in combinations(labels, 2):
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3], (first, second)
        assert browser.complaints == [] and browser.requests == [page.as_uri()]


# Cells and pieces of the picture that do not lie within the window, or are squeezed into a column of single letters.
CLIPPED = """
[...document.querySelectorAll("td, svg text")].filter((n) => n.checkVisibility() && n.textContent).flatMap((n) => {
  const r = n.getBoundingClientRect(), where = document.createRange();
  where.selectNodeContents(n);
  const words = where.getBoundingClientRect();
  const outside = Math.min(r.left, words.left) < 0 || Math.max(r.right, words.right) > innerWidth;
  return outside || (n.tagName === "TD" && r.height > 150) ? [[n.textContent, r.left, r.right, r.height]] : [];
})
"""


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
@pytest.mark.parametrize("width", [400, 1200])
def test_every_column_and_every_name_is_seen_without_scrolling(tmp_path: Path, analysis: Analysis, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(roofline_page(analysis), encoding="utf-8")
    with Browser(width, 900) as browser:
        browser.open(page)
        assert browser.evaluate(CLIPPED) == []
        for name in ("rows", "bounds", "changes"):
            table = f"document.getElementById('{name}').parentElement"
            assert browser.evaluate(f"{table}.scrollWidth") <= browser.evaluate(f"{table}.clientWidth"), name
        # On a narrow page the label of a row comes first, and its figures have their names.
        label, first = browser.evaluate(
            "[...document.querySelectorAll('#rows tbody tr:first-child td')].map(n => n.getBoundingClientRect().top)"
            ".toSpliced(1, 6).reverse()"
        )
        assert (label < first) == (width == 400)
        named = browser.evaluate("getComputedStyle(document.querySelector('#rows [data-name]'), '::before').content")
        assert ("time" in named) == (width == 400)


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.ABSENT)
def test_a_mark_says_its_figures_under_the_pointer_and_in_focus(tmp_path: Path, analysis: Analysis) -> None:
    page = tmp_path / "page.html"
    page.write_text(roofline_page(analysis), encoding="utf-8")
    with Browser(1200, 900) as browser:
        browser.open(page)
        last = "[...document.querySelectorAll('.wide .mark')].at(-1)"
        x, y = browser.evaluate(
            f"(() => {{ {last}.scrollIntoView({{block: 'center'}}); const r = {last}.getBoundingClientRect();"
            "return [(r.left + r.right) / 2, (r.top + r.bottom) / 2 + 1]; })()"
        )
        browser.hover(x, y)
        assert "calls" in browser.evaluate("tip.innerText") and not browser.evaluate("tip.hidden")
        browser.hover(2, 2)
        assert browser.evaluate("tip.hidden")
        browser.evaluate("document.querySelector('.wide .mark').focus()")
        assert not browser.evaluate("tip.hidden")
        browser.press("Escape")
        assert browser.evaluate("tip.hidden")

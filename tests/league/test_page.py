"""The page of the league, from made-up results."""

import json
import sys
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"
sys.path.insert(0, str(LEAGUE))

import page  # noqa: E402


def row(
    name: str, measured: int | None, says: dict[str, int], fits: bool | None = None, **others: object
) -> dict[str, object]:
    kept: dict[str, object] = {
        "name": name, "card": "h100", "torch": "2.6", "meter": "allocated", "measured": measured, "resolution": 0, "fits": fits,
        "says": says, "says_fits": {}, "refused": {},
    }  # fmt: skip
    return kept | others


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        row("a", 1000, {"tonnage": 1010, "xMem": 1500}, fits=True, says_fits={"tonnage": True, "xMem": True}),
        row("b", 1000, {"tonnage": 1000, "xMem": 900}, fits=True, says_fits={"tonnage": True}),
        row("c", 2000, {"tonnage": 2060}, card="a100-80", refused={"xMem": "no kernel"}),
        row("d", None, {}, fits=False, says_fits={"tonnage": True}, refused={"tonnage": "a <library> is missing"}),
    ]
    published = {
        "title": "Others & co",
        "where": "there at 1a2b",
        "read": 9,
        "left_out": {"no figure": 5},
        "rows": rows,
    }
    own = {
        "title": "Our H200",
        "where": "here",
        "read": 1,
        "left_out": {},
        "rows": [row("e", 100, {"tonnage": 100, "MemTracker": 99})],
    }
    (tmp_path / "xmem.json").write_text(json.dumps(published))
    (tmp_path / "h200.json").write_text(json.dumps(own))
    return tmp_path


def test_a_cell_has_the_median_and_how_many_were_said(results: Path) -> None:
    table = page.errors_table([source for source in page.standings(results) if source.key == "xmem"])
    assert table.columns == ["source", "Tonnage", "xMem"]
    assert table.rows == [["Others & co", "1.0 % · 3/3", "30 % · 2/3"]]


def test_rivals_are_compared_on_the_rows_of_both(results: Path) -> None:
    others, _ = page.standings(results)
    assert page.duels_table([others]).rows == [["Others & co", "xMem", "2", "0.50 %", "30 %", "0.90 %", "46 %"]]


def test_verdicts_count_rows_without_a_figure(results: Path) -> None:
    others, _ = page.standings(results)
    ours, theirs = "2/3 (66.7 %)", "1/1 (100.0 %)"
    assert page.verdicts_table([others]).rows == [["Others & co", ours, theirs], ["all", ours, ""]]


def test_our_own_measurements_stand_apart_and_reasons_are_told(results: Path) -> None:
    text = page.markdown(page.standings(results), "x.svg")
    published, _, own = text.partition("## On our own measurements")
    assert "4 rows of 1 sources, 2 cards and 1 versions" in published
    assert "MemTracker" not in published
    assert "MemTracker" in own
    assert "- 5: no figure" in own
    assert "- 1: Tonnage: a <library> is missing" in own


def test_rows_that_were_not_asked_do_not_count_as_silence(tmp_path: Path) -> None:
    rows = [
        row("a", 100, {"tonnage": 100, "MemTracker": 90}),
        row("b", 100, {"tonnage": 100}, refused={"MemTracker": "not asked"}),
    ]
    (tmp_path / "timm.json").write_text(
        json.dumps({"title": "T", "where": "", "read": 2, "left_out": {}, "rows": rows})
    )
    assert page.errors_table(page.standings(tmp_path)).rows == [["T", "0 % · 2/2", "10 % · 1/1"]]


def test_an_error_within_what_was_rounded_is_none(tmp_path: Path) -> None:
    rows = [row("a", 1000, {"tonnage": 1004}, resolution=5)]
    result = {"title": "T", "where": "", "read": 1, "left_out": {}, "rows": rows}
    (tmp_path / "timm.json").write_text(json.dumps(result))
    assert page.errors_table(page.standings(tmp_path)).rows == [["T", "0 % · 1/1"]]


def test_the_command_writes_the_page_its_figure_and_the_document(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = tmp_path / "out" / "accuracy.html"
    monkeypatch.setattr(
        "sys.argv", ["page.py", "--results", str(results), "--docs", str(tmp_path / "docs"), "--html", str(html)]
    )
    page.main()
    assert (tmp_path / "docs" / "accuracy.md").read_text().startswith("# Accuracy")
    assert (tmp_path / "docs" / "images" / "accuracy.svg").read_text().count("<circle") == 4
    assert "a &lt;library&gt; is missing" in html.read_text()
    assert "http" not in html.read_text().replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.skipif(not (page.ROOT / "docs" / "accuracy.md").exists(), reason="no results are kept yet")
def test_the_document_is_made_from_what_is_kept() -> None:
    written = (page.ROOT / "docs" / "accuracy.md").read_text("utf-8")
    assert written == page.markdown(page.standings(page.RESULTS), "images/accuracy.svg"), "make league-page"


def test_without_results_it_says_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["page.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="make league"):
        page.main()

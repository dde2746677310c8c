"""A few rows of each source of the league, the same in every run: Tonnage must say of them what was kept."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
LEAGUE = ROOT / "benchmarks" / "league"
sys.path.insert(0, str(LEAGUE))

from rows import Prediction, Reading, Row  # noqa: E402

import league  # noqa: E402

KEPT = [name for name in league.SOURCES if (league.RESULTS / f"{name}.json").exists()]


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> tuple[int, str]:
    """How a check of every source that this run tests ends, and what it says: one process loads torch once for all of them."""
    own = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    names = [name for name in KEPT if any(params.get("name") == name for params in own) and _can_run(name)]
    if not names:
        return 0, ""
    words = [sys.executable, str(LEAGUE / "league.py"), "--check", "--sample", "2", *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False)
    return done.returncode, done.stderr


def _can_run(name: str) -> bool:
    return name not in league.CUDA_BUILD or (ROOT / ".venv-cuda").exists()


@pytest.mark.parametrize("name", KEPT)
def test_predictions_are_what_was_kept(said: tuple[int, str], name: str) -> None:
    if not _can_run(name):
        pytest.skip("needs `make setup-cuda`")
    status, words = said
    # Each difference begins with its source; words of no source are a check that ended halfway.
    told = {line.partition(":")[0].removesuffix(" failed") for line in words.splitlines()}
    assert status == 0 or (told & {*KEPT} and name not in told), words


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A source of three rows in place of a real one, of which Tonnage says 100 bytes; results are kept in a folder of its own."""
    from collections import Counter

    source = SimpleNamespace(title="T", where="W", rivals={}, asked=[], says=100, slow=lambda row: False)
    rows = [Row(name, "h100", "2.6", {}, measured=100) for name in "abc"]
    source.read = lambda: Reading(rows, Counter({"no figure": 2}))
    source.predict = lambda row: source.asked.append(row.name) or Prediction(source.says, True)
    monkeypatch.setitem(sys.modules, "sources.made_up", SimpleNamespace(SOURCE=source))
    monkeypatch.setattr(league, "RESULTS", tmp_path)
    return source


def test_a_run_that_was_stopped_goes_on(made_up: SimpleNamespace, tmp_path: Path) -> None:
    whole = league.judged("made_up", None, resume=False)
    assert json.loads((tmp_path / "made_up.json").read_text()) == whole
    assert whole["read"] == 5
    league.save("made_up", whole | {"rows": whole["rows"][:2]})
    made_up.asked.clear()
    assert league.judged("made_up", None, resume=True) == whole
    assert made_up.asked == ["c"]


def test_a_prediction_that_changed_is_named(made_up: SimpleNamespace) -> None:
    league.judged("made_up", None, resume=False)
    assert league.changed("made_up", 3) == []
    made_up.says = 200
    assert league.changed("made_up", 1) == ["made_up: c: 200 bytes, fits: True; kept: 100 bytes, fits: True"]


def test_a_sample_keeps_nothing(made_up: SimpleNamespace, tmp_path: Path) -> None:
    assert len(league.judged("made_up", 2, resume=False)["rows"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_slow_row_is_in_no_sample(made_up: SimpleNamespace) -> None:
    league.judged("made_up", None, resume=False)
    made_up.asked.clear()
    made_up.slow = lambda row: row.name == "a"
    assert league.changed("made_up", 3) == []
    assert made_up.asked == ["b", "c"]

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snapshots import DATA
from support import training_run
from tonnage.commands.app import app
from tonnage.recording import write_recording
from virtual_runs import run_tonnage


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    write_recording(tmp_path / "a.tonnage", training_run(batch=4))
    write_recording(tmp_path / "b.tonnage", training_run(batch=8))
    return str(tmp_path / "a.tonnage"), str(tmp_path / "b.tonnage")


def test_what_grew_is_shown_by_category_module_and_line(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["diff", *pair])
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    for words in ("activations", "layers.*.mlp", "train.py:88", "+"):
        assert words in done.output


@pytest.mark.parametrize(("limit", "status"), [("1%", 1), ("1MiB", 1), ("500%", 0), ("100GiB", 0)])
def test_growth_past_the_limit_fails(pair: tuple[str, str], limit: str, status: int) -> None:
    done = CliRunner().invoke(app, ["diff", *pair, "--fail-above", limit])
    assert done.exit_code == status
    assert ("more than" if status else "within") in done.output
    assert CliRunner().invoke(app, ["diff", *reversed(pair), "--fail-above", limit]).exit_code == 0


def test_the_figures_are_the_recordings_own(pair: tuple[str, str], tmp_path: Path) -> None:
    target = tmp_path / "diff.json"
    done = CliRunner().invoke(app, ["diff", *pair, "--json", str(target), "--fail-above", "1%"])
    figures = json.loads(target.read_text())
    assert done.exit_code == 1 and figures["failed"]
    before, after = training_run(batch=4), training_run(batch=8)
    by_name = {growth["name"]: growth for growth in figures["categories"]}
    for category, size in after.ledger().bytes_by_category.items():
        assert by_name[category]["after_bytes"] == size
        assert by_name[category]["before_bytes"] == before.ledger()[category]


def test_a_snapshot_compares_with_a_recording(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["diff", pair[0], str(DATA / "normal.pickle.gz")])
    assert done.exit_code == 0
    assert "nano_gpt.py:59" in done.output and "snapshot" in done.output


def test_a_limit_that_is_none_is_refused_in_words(pair: tuple[str, str]) -> None:
    done = run_tonnage("diff", *pair, "--fail-above", "lots")
    assert done.returncode == 2
    assert "5%" in done.stderr and "Traceback" not in done.stderr


def test_json_on_standard_output_is_data_alone(pair: tuple[str, str]) -> None:
    done = run_tonnage("diff", *pair, "--json", "-")
    assert json.loads(done.stdout)["failed"] is False
    assert done.stderr == ""


def test_tables_for_a_pull_request_are_markdown(pair: tuple[str, str], tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["diff", *pair, "--markdown", "-", "--fail-above", "1%", "--rows", "2"])
    assert printed.exit_code == 1 and printed.output.startswith("### GPU memory of `")
    assert "| peak | a | b | change |\n|---|--:|--:|--:|\n| `allocated` |" in printed.output
    assert "more than 1%" in printed.output and "`train.py:87`" in printed.output and "more | | |" in printed.output
    target = tmp_path / "diff.md"
    both = CliRunner().invoke(app, ["diff", *pair, "--markdown", str(target), "--rows", "2"])
    assert both.exit_code == 0 and "allocated, at the peak" in both.output and "| `allocated` |" in target.read_text()

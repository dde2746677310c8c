import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import gone_on, training_run
from tonnage.commands.app import app
from tonnage.errors import OutputExists, RequestError
from tonnage.recording import write_recording


def test_show_reports_a_recording_without_the_run(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run())
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run.tonnage"), "--json", str(tmp_path / "run.json")])
    assert done.exit_code == 0
    assert "activations" in done.output
    assert json.loads((tmp_path / "run.json").read_text())["gpu"] == "NVIDIA H200"


def test_show_of_a_run_that_died_still_worked(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run(gpu="t4", batch=64))
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run.tonnage")])
    assert done.exit_code == 0
    assert "what would save it" in done.output


def test_show_says_what_a_run_needs_in_all_and_which_cards_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    write_recording(path, gone_on(batch=96, layers=12))
    assert "in all" in CliRunner().invoke(app, ["show", str(path)]).output
    done = CliRunner().invoke(app, ["show", str(path), "--gpu", "all"])
    assert done.exit_code == 0 and "these hold it" in done.output
    done = CliRunner().invoke(app, ["show", str(path), "--gpu", "l40s,4090"])
    assert done.exit_code == 0 and "l40s" in done.output and "rtx-4090" in done.output
    write_recording(path, training_run(gpu="t4", batch=64), force=True)
    with pytest.raises(RequestError, match="ends where its run ran out of memory"):
        CliRunner().invoke(app, ["show", str(path), "--gpu", "all"], catch_exceptions=False)


def test_show_writes_a_page_and_never_over_another(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run())
    page = tmp_path / "report.html"
    words = ["show", str(tmp_path / "run.tonnage"), "--html", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"wrote {page}" in done.output
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    with pytest.raises(OutputExists):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert page.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert "What to do" in page.read_text()


def test_with_json_on_standard_output_the_page_is_spoken_of_elsewhere(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run())
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run.tonnage"), "--html", str(page), "--json", "-"])
    assert json.loads(done.stdout)["outcome"] == "ok" and "wrote" in done.stderr
    assert page.exists()


def test_a_page_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run())
    with pytest.raises(RequestError, match="Cannot write"):
        words = ["show", str(tmp_path / "run.tonnage"), "--html", str(tmp_path / "absent" / "report.html")]
        CliRunner().invoke(app, words, catch_exceptions=False)

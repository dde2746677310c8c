import json
from pathlib import Path

from typer.testing import CliRunner

from support import training_run
from tonnage.commands.app import app
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

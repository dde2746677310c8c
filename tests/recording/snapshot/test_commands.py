"""`tonnage show` and `tonnage replay` take a snapshot where they take their own files, whatever its name."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snapshots import DATA
from support import training_run
from tonnage.commands.app import app
from tonnage.errors import BadRecording, BadSnapshot
from tonnage.recording import open_recording, read_recording, write_recording

REAL = sorted(DATA.glob("*.gz"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_show_reports_a_snapshot(path: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(path), "--json", "-"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["source"] == "snapshot"
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert "activations" in done.stderr


def test_advice_on_a_card_of_unknown_size_is_computed() -> None:
    done = CliRunner().invoke(app, ["show", str(DATA / "normal.pickle.gz"), "--json", "-"])
    fixes = {fix["change"]: fix for fix in json.loads(done.stdout)["fixes"]}
    assert 10**9 < fixes["expandable segments"]["saves_bytes"] < 3 * 10**9


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_replay_of_a_snapshot_is_exact(path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert done.exit_code == 0, done.output
    assert "exact" in done.stdout.splitlines()[0]


def test_files_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "a.tonnage").write_bytes(gzip.decompress((DATA / "oom.pickle.gz").read_bytes()))
    write_recording(tmp_path / "b.pickle", training_run())
    assert open_recording(tmp_path / "a.tonnage").header.source == "snapshot"
    assert open_recording(tmp_path / "b.pickle").header.source == "virtual"
    (tmp_path / "text.pickle").write_text("hello")
    with pytest.raises(BadRecording):
        open_recording(tmp_path / "text.pickle")
    (tmp_path / "evil.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(BadSnapshot):
        open_recording(tmp_path / "evil.pickle")


def test_a_snapshot_can_be_kept_as_a_recording(tmp_path: Path) -> None:
    recording = open_recording(DATA / "fragmented.pickle.gz")
    write_recording(tmp_path / "kept.tonnage", recording)
    again = read_recording(tmp_path / "kept.tonnage")
    assert again.allocations == recording.allocations
    assert again.oom == recording.oom
    assert again.header == recording.header

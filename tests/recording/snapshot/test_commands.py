"""`tonnage show` and `tonnage replay` take a snapshot where they take their own files, whatever its name."""

import gzip
import json
import pickle
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
    report = CliRunner().invoke(app, ["show", str(path)]).stdout
    assert max(map(len, report.splitlines())) <= 80
    assert "activations" in report


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


def test_replay_and_explain_promise_the_same() -> None:
    """What a setting saves is computed once, whoever tells it."""
    path = str(DATA / "fragmented.pickle.gz")
    replayed, explained = (
        json.loads(CliRunner().invoke(app, [verb, path, "--json", "-"]).stdout) for verb in ("replay", "explain")
    )
    fix = next(fix for fix in explained["fixes"] if fix["name"] == "expandable segments")
    assert replayed["expandable_segments_save_bytes"] == fix["saves_bytes"] == 408 * 2**20


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_a_limit_of_its_own_asks_for_no_larger_card(verb: str) -> None:
    """The card had 134 GiB free."""
    done = CliRunner().invoke(app, [verb, str(DATA / "fragmented.pickle.gz")])
    assert "a higher limit" in done.output
    assert "larger card" not in done.output


def test_every_verb_takes_a_snapshot_that_begins_in_mid_run(tmp_path: Path) -> None:
    snapshot = pickle.loads(gzip.decompress((DATA / "normal.pickle.gz").read_bytes()))
    trace = snapshot["device_traces"][0]
    snapshot["device_traces"] = [trace[len(trace) // 2 :]]
    path = tmp_path / "tail.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    page = str(tmp_path / "page.html")
    for words in (["show"], ["show", "--html", page], ["explain"], ["replay"], ["diff", str(path)]):
        done = CliRunner().invoke(app, [words[0], str(path), *words[1:]])
        assert done.exit_code == 0, (words, done.output)
    assert "It begins in mid-run" in CliRunner().invoke(app, ["replay", str(path)]).stdout


def test_blocks_in_no_segment_leave_nothing_negative(tmp_path: Path) -> None:
    """As tools write them that make snapshots up: events at addresses that no segment has, and frees without requests."""
    events = [
        {"action": action, "addr": 2**50 + 7, "size": 90 * 2**20, "stream": 1, "frames": []}
        for action in ("alloc", "free_completed", "alloc")
    ]
    path = tmp_path / "made-up.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    recording = open_recording(path)
    assert recording.peak_reserved_bytes == recording.peak_allocated_bytes == 90 * 2**20
    assert recording.unused_at_peak_bytes == 0
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert done.exit_code == 1
    assert "2 blocks lie in no segment" in done.stdout

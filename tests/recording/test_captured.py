"""A captured step: the questions that are asked of it, and its way through a file."""

import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import training_run
from tonnage.clock.captured import CapturedCall, CapturedStep
from tonnage.errors import BadRecording
from tonnage.recording import read_recording, write_recording
from tonnage.recording.layout import APPLICATION_ID, SCHEMAS
from tonnage.recording.store import packed, unpacked

LINEAR = CapturedCall(
    name="linear", shapes=((4, 8), (8, 8)), strides=((8, 1), (8, 1)), types=("float", "float"), devices=("cuda", "cuda")
)
MM = replace(LINEAR, name="mm")
NODE = CapturedCall(name="MmBackward0", kind="node")
UPDATE = CapturedCall(name="_foreach_add_", shapes=(((8, 8), (8,)), ()), types=("float[]", "Scalar"), values=("", "1"))
STEP = CapturedStep(
    number=2, training=True, calls=(LINEAR, MM, NODE, UPDATE), sequence=(0, 1, 2, 1, 3), depths=(0, 1, 0, 1, 0),
    threads=(0, 0, 1, 1, 0), phases=((0, "forward"), (2, "backward"), (4, "optimizer")), module_calls=1,
    optimizer_parameters=2, samples=4, tokens=None, settings={"matmul_tf32": "True"},
)  # fmt: skip


def test_places_know_their_callers_and_phases() -> None:
    moments = list(STEP.moments())
    assert [moment.parent for moment in moments] == [None, 0, None, 2, None]
    assert [moment.phase for moment in moments] == ["forward", "forward", "backward", "backward", "optimizer"]


def test_a_step_reads_back(tmp_path: Path) -> None:
    recording = training_run()
    recording.captured = STEP
    write_recording(tmp_path / "run.tonnage", recording)
    assert read_recording(tmp_path / "run.tonnage") == recording


def test_a_file_from_before_steps_were_captured_opens(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    recording = training_run()
    write_recording(path, recording)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE captured")
        database.execute("PRAGMA user_version = 1")
        assert database.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert "captured" not in SCHEMAS[1]
    assert read_recording(path) == recording


def test_a_file_from_before_streams_were_known_opens(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    recording = training_run()
    recording.captured = STEP
    write_recording(path, recording)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (5,)
        database.execute("PRAGMA user_version = 3")
    assert read_recording(path) == recording


def test_notes_of_streams_and_collectives_read_back() -> None:
    notes = (
        CapturedCall(name="wait_event", kind="stream", values=("1", "0")),
        CapturedCall(name="all_reduce", kind="collective", values=("1", "4096", "8", "1", "1")),
    )
    step = replace(STEP, calls=notes, sequence=(0, 1), depths=(0, 0), threads=(0, 0), phases=())
    assert unpacked(packed(step)) == step


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence", [4, 0, 0, 0, 0]),
        ("sequence", [0]),
        ("depths", [-1, 0, 0, 0, 0]),
        ("phases", [[0]]),
        ("samples", "many"),
        ("calls", [{"name": "mm"}]),
        ("settings", {"matmul_tf32": 1}),
    ],
)
def test_what_no_run_can_have_written_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    changed = json.loads(zlib.decompress(packed(STEP))) | {key: value}
    data = zlib.compress(json.dumps(changed).encode())
    with pytest.raises(ValueError, match="its "):
        unpacked(data)
    path = tmp_path / "run.tonnage"
    write_recording(path, training_run())
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO captured VALUES (?)", (data,))
        database.commit()
    with pytest.raises(BadRecording, match="not a readable recording"):
        read_recording(path)


def test_bytes_that_are_no_step_are_refused() -> None:
    for data in (b"", b"no zlib", zlib.compress(b"[]"), zlib.compress(b"not json")):
        with pytest.raises(ValueError, match="its step"):
            unpacked(data)

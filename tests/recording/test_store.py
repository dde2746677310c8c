import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strange_numbers import opens_or_says_why, strange_files
from support import MIB, Run, training_run
from tonnage.errors import BadRecording, OutputExists, RequestError
from tonnage.ledger import Category
from tonnage.recording import Allocation, Header, Note, Recording, StandIn, read_recording, write_recording
from tonnage.recording.layout import SCHEMAS

words = st.text(max_size=20).map(lambda text: "".join(character for character in text if character.isprintable()))
sizes = st.integers(0, 2**50)
shapes = st.one_of(st.none(), st.lists(sizes, max_size=4).map(tuple))
allocations = st.builds(
    Allocation,
    index=st.just(0),
    address=sizes,
    requested_bytes=sizes,
    block_bytes=sizes,
    stream=sizes,
    born=st.integers(0, 9),
    died=st.one_of(st.none(), st.integers(10, 20)),
    category=st.sampled_from(Category),
    operator=words,
    module=words,
    phase=words,
    step=sizes,
    line=words,
    stack=st.lists(words.filter(bool), max_size=3).map(tuple),
    shape=shapes,
    dtype=words,
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "run.tonnage"
    write_recording(path, training_run())
    return path


@given(st.lists(allocations, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_what_is_written_reads_back(tmp_path: Path, made: list[Allocation]) -> None:
    numbered = [replace(a, index=index) for index, a in enumerate(made)]
    recording = Recording(Run().header, numbered)
    write_recording(tmp_path / "any.tonnage", recording, force=True)
    assert read_recording(tmp_path / "any.tonnage") == recording


@pytest.mark.parametrize("recording", [training_run(), training_run(gpu="t4", batch=64)], ids=["ok", "oom"])
def test_a_whole_run_reads_back(tmp_path: Path, recording: Recording) -> None:
    recording.stand_ins.append(StandIn("item", "train.py:90", 3, "0.0"))
    recording.notes.append(Note("assumption", "nonzero", 1, "half of the elements are nonzero"))
    recording.header.overhead_parts = {"context": 1}
    write_recording(tmp_path / "run.tonnage", recording)
    assert read_recording(tmp_path / "run.tonnage") == recording


def test_an_existing_file_stays_unless_forced(written: Path) -> None:
    before = written.read_bytes()
    with pytest.raises(OutputExists, match="exists already"):
        write_recording(written, Run().recording)
    assert written.read_bytes() == before
    write_recording(written, Run().recording, force=True)
    assert read_recording(written).allocations == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = Run().recording
    broken.allocations = [Allocation(0, 0, 2**80, 512, 0, 0)]
    with pytest.raises(OverflowError):
        write_recording(tmp_path / "run.tonnage", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="no recording at") as caught:
        read_recording(tmp_path / "none.tonnage")
    assert "tonnage run -o" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100, b"SQLite format 3\x00" + bytes(200)])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.tonnage"
    path.write_bytes(content)
    with pytest.raises(BadRecording):
        read_recording(path)
    assert path.read_bytes() == content


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "run.tonnage").touch()
    with pytest.raises(BadRecording, match="is empty"):
        read_recording(tmp_path / "run.tonnage")


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE header (key TEXT)")
    with pytest.raises(BadRecording, match="not a recording of Tonnage"):
        read_recording(tmp_path / "other.db")


@pytest.mark.parametrize(("version", "hint"), [(max(SCHEMAS) + 1, "Upgrade Tonnage"), (0, "Make it again")])
def test_other_layouts_are_refused_with_the_way_out(written: Path, version: int, hint: str) -> None:
    change(written, f"PRAGMA user_version = {version}")
    with pytest.raises(BadRecording, match=f"layout {version}") as caught:
        read_recording(written)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW sneaky AS SELECT * FROM allocation",
        "CREATE TRIGGER sneaky AFTER INSERT ON mark BEGIN DELETE FROM mark; END",
        "DROP TABLE note",
    ],
)
def test_a_file_with_other_tables_is_refused(written: Path, statement: str) -> None:
    change(written, statement)
    with pytest.raises(BadRecording, match="its tables are others"):
        read_recording(written)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM header WHERE key = 'gpu'",
        "UPDATE header SET value = '{' WHERE key = 'gpu'",
        "UPDATE header SET value = '7' WHERE key = 'gpu'",
        "UPDATE header SET value = '\"fine\"' WHERE key = 'outcome'",
        "UPDATE header SET value = 'null' WHERE key = 'capacity_bytes'",
        "INSERT INTO mark VALUES (1, 'step', 'first')",
        "INSERT INTO mark VALUES (1, 'sleep', '')",
        "DELETE FROM context",
        "UPDATE context SET category = operator",
        "UPDATE context SET shape = category",
        "INSERT INTO oom VALUES ('[]')",
        "INSERT INTO oom VALUES ('" + "[" * 100_000 + "')",
        "UPDATE header SET value = '1e999' WHERE key = 'wall_seconds'",
        "UPDATE header SET value = 'NaN' WHERE key = 'wall_seconds'",
        "UPDATE header SET value = '-1' WHERE key = 'capacity_bytes'",
        "UPDATE header SET value = '{\"context\": null}' WHERE key = 'overhead_parts'",
        "UPDATE header SET value = '[1]' WHERE key = 'arguments'",
        "UPDATE header SET value = '" + "[" * 100_000 + "' WHERE key = 'overhead_parts'",
        "UPDATE context SET stack = '[7]'",
        "UPDATE context SET shape = '[null]'",
        "UPDATE context SET shape = '[1e999]'",
        "UPDATE context SET module = NULL",
        "UPDATE allocation SET block_bytes = NULL",
        "UPDATE allocation SET block_bytes = -1",
        "UPDATE allocation SET born = NULL",
        "UPDATE allocation SET died = born",
        "UPDATE allocation SET born = 4611686018427387904, died = NULL",
        "UPDATE segment SET action = 'null'",
        "UPDATE segment SET sequence = 4611686018427387904",
        "UPDATE segment SET size_bytes = NULL",
        "INSERT INTO mark VALUES (NULL, 'phase', 'x')",
        "INSERT INTO mark VALUES (1, 'phase', NULL)",
        "INSERT INTO mark VALUES (1, 'step', '99999999999999999999')",
        "INSERT INTO note VALUES ('assumption', NULL, 1, 'x')",
        "INSERT INTO stand_in VALUES ('item', 'x', NULL, 'x')",
    ],
)
def test_damaged_rows_are_refused_in_words(written: Path, statement: str) -> None:
    change(written, statement)
    with pytest.raises(BadRecording, match="not a readable recording"):
        read_recording(written)


def test_a_cut_off_file_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes()[: written.stat().st_size // 2])
    with pytest.raises(BadRecording):
        read_recording(written)


def test_what_blocks_have_in_common_is_written_once(tmp_path: Path) -> None:
    few, many = (training_run(steps=steps) for steps in (2, 20))
    write_recording(tmp_path / "few.tonnage", few)
    write_recording(tmp_path / "many.tonnage", many)
    assert rows(tmp_path / "few.tonnage", "context") == rows(tmp_path / "many.tonnage", "context")
    assert rows(tmp_path / "many.tonnage", "allocation") == len(many.allocations)


def test_every_field_of_the_header_is_kept(tmp_path: Path) -> None:
    header = Header(gpu="h200", gpu_name="NVIDIA H200", capacity_bytes=1, torch_modelled="2.11", torch_installed="2.13")
    header.arguments, header.wall_seconds, header.overhead_parts = ("--batch", "8"), 1.5, {"context": 7}
    write_recording(tmp_path / "h.tonnage", Recording(header))
    assert read_recording(tmp_path / "h.tonnage").header == header


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()


def test_a_header_with_any_number_opens_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    run = Run(overhead_parts={"context": MIB})
    run.alloc(MIB)
    write_recording(path, run.recording)
    refused = set()
    for name, number in strange_files(path, "header", "value", "key"):
        if opens_or_says_why(path):
            refused.add((name, number))
    numeric = ("capacity_bytes", "exit_status", "wall_seconds", "overhead_bytes", "ooms_caught", "pinned_host_bytes")
    for name in numeric:
        assert {(name, number) for number in ("NaN", "Infinity", "1e999", str(2**80), '"7"', "[]")} <= refused
    assert opens_or_says_why(path) == ""


def test_a_failed_request_with_any_number_opens_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    write_recording(path, training_run(gpu="t4", batch=64))
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        (value,) = database.execute("SELECT value FROM oom").fetchone()
        fields = [name for name, held in json.loads(value).items() if isinstance(held, int)]
        assert "requested_bytes" in fields and "step" in fields
        for name in fields:
            for number in ("Infinity", "-1", str(2**80), '"7"'):
                database.execute("UPDATE oom SET value = json_replace(?, ?, json(?))", (value, f"$.{name}", "0"))
                (changed,) = database.execute("SELECT value FROM oom").fetchone()
                spoilt = changed.replace(f'"{name}":0', f'"{name}":{number}')
                assert spoilt != changed
                database.execute("UPDATE oom SET value = ?", (spoilt,))
                assert f"its {name} is" in opens_or_says_why(path)


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_nothing_that_moves_a_cursor_comes_out_of_a_file(tmp_path: Path) -> None:
    recording = Run(script="a\x1b[2Jb", error="one\ntwo\x07").recording
    recording.notes.append(Note("assumption", "x\x1b]0;t\x07", 1, "fine"))
    write_recording(tmp_path / "run.tonnage", recording)
    found = read_recording(tmp_path / "run.tonnage")
    assert (found.header.script, found.header.error, found.notes[0].operator) == ("a?[2Jb", "one\ntwo?", "x?]0;t?")


def test_a_file_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Cannot write .*run\.tonnage: "):
        write_recording(tmp_path / "none" / "run.tonnage", training_run())
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match="Cannot write "):
        write_recording(tmp_path / "folder", training_run(), force=True)
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


def test_a_file_from_before_a_run_said_who_drives_it_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "run.tonnage"
    write_recording(path, training_run(training={"trainer": "lightning"}))
    assert read_recording(path).header.training == {"trainer": "lightning"}
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM header WHERE key = 'training'")
        database.commit()
    assert read_recording(path).header.training == {}

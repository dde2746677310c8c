"""Hostile and broken files: refused in one line, in bounded memory and time, with nothing run."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_snapshots import CANARY, KINDS
from snapshots import DATA, read
from tonnage.errors import BadSnapshot
from tonnage.recording import Recording
from tonnage.recording.snapshot import read_snapshot

MOST_BYTES = 2**30
MOST_SECONDS = 10
# Reads every file of a kind with the memory of the whole process limited, and reports what would run code.
READER = """
import json, os, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import hostile_snapshots
from tonnage.errors import BadSnapshot
from tonnage.recording.snapshot import read_snapshot
ran, report = [], {}
watched = ("pickle.find_class", "os.system", "subprocess.Popen", "exec", "compile", "import")
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), int(sys.argv[3])))
kind = getattr(hostile_snapshots, sys.argv[2])
Path("file").write_bytes(b"")
try:
    read_snapshot(Path("file"))
except BadSnapshot:
    pass
files = kind()
active = False
sys.addaudithook(lambda event, _: ran.append(event) if active and event in watched else None)
for name, data in files:
    Path("file").write_bytes(data)
    del data
    start, active = time.process_time(), True
    try:
        read_snapshot(Path("file"))
        words = "READ"
    except BadSnapshot as error:
        words = error.words
    active = False
    report[name] = (words, time.process_time() - start)
print(json.dumps([report, ran]))
"""


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_each_is_refused_in_one_line_and_nothing_runs(kind: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", READER, str(Path(__file__).parents[2]), kind, str(MOST_BYTES)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report, ran = json.loads(done.stdout)
    assert report
    assert ran == []
    assert not (tmp_path / CANARY).exists()
    for name, (refusal, seconds) in report.items():
        assert refusal.startswith("file is not a snapshot that can be read: "), name
        assert refusal.isprintable(), name
        assert seconds < MOST_SECONDS, name


def test_the_canary_would_have_sung(tmp_path: Path) -> None:
    evil = dict(corpus_of("code_execution"))["runs-in-an-event-4"]
    (tmp_path / "file").write_bytes(evil)
    subprocess.run([sys.executable, "-m", "pickle", "file"], cwd=tmp_path, capture_output=True, check=False)
    assert (tmp_path / CANARY).exists()


def corpus_of(kind: str):
    return next(k for k in KINDS if k.__name__ == kind)()


def test_there_are_many_of_them() -> None:
    names = [name for kind in ("code_execution", "cycles", "broken", "wrong_types") for name, _ in corpus_of(kind)]
    assert len(names) == len(set(names))
    assert len(names) > 250


def outcome(data: bytes) -> Recording | BadSnapshot:
    """Whatever else is raised fails the test."""
    try:
        return read(data)
    except BadSnapshot as error:
        assert str(error).isprintable()
        return error


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert isinstance(outcome(data), BadSnapshot)


@given(st.integers(2, 5), st.binary(max_size=300))
def test_any_opcodes_are_a_recording_or_refused(protocol: int, body: bytes) -> None:
    outcome(b"\x80" + bytes([protocol]) + body + b".")


@given(st.data())
def test_a_snapshot_with_bent_bytes_is_a_recording_or_refused(choices: st.DataObject) -> None:
    data = bytearray(whole())
    for _ in range(choices.draw(st.integers(1, 4))):
        place = choices.draw(st.integers(0, len(data) - 1))
        data[place] = choices.draw(st.integers(0, 255))
    result = outcome(bytes(data))
    if isinstance(result, Recording):
        assert result.peak_reserved_bytes >= 0


@given(st.integers(0, 21_835))
def test_a_snapshot_that_is_cut_is_refused(end: int) -> None:
    assert isinstance(outcome(whole()[:end]), BadSnapshot)


def whole() -> bytes:
    return gzip.decompress((DATA / "oom.pickle.gz").read_bytes())


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadSnapshot, match="cannot be read: No such file"):
        read_snapshot(tmp_path / "no.pickle")
    with pytest.raises(BadSnapshot, match="cannot be read: Is a directory"):
        read_snapshot(tmp_path)

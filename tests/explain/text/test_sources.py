import io
import os
import sys
from pathlib import Path

import pytest

from snapshots import DATA
from support import training_run
from tonnage.errors import RequestError
from tonnage.explain.text.sources import clipboard, is_text, standard_input
from tonnage.recording import write_recording


def test_a_file_is_told_apart_by_its_content(tmp_path: Path) -> None:
    error = tmp_path / "error.pickle"
    error.write_text("CUDA out of memory")
    recording = tmp_path / "run.txt"
    write_recording(recording, training_run())
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    (tmp_path / "windows.log").write_bytes("CUDA out of memory".encode("utf-16"))
    assert is_text(error) and is_text(tmp_path / "windows.log")
    assert not is_text(recording) and not is_text(DATA / "oom.pickle.gz")
    assert not is_text(tmp_path / "missing")
    with pytest.raises(RequestError, match="is a picture"):
        is_text(tmp_path / "picture.txt")


def test_the_clipboard_is_read_by_the_program_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="cannot be read"):
        clipboard()
    reader = tmp_path / "xclip"
    reader.write_text(f"#!{sys.executable}\nprint('CUDA out of memory')\n")
    reader.chmod(0o755)
    assert clipboard().read() == b"CUDA out of memory\n"
    reader.write_text(f"#!{sys.executable}\n")
    with pytest.raises(RequestError, match="no text"):
        clipboard()


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"\x80\x04\x95")
    os.close(write)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb")))
    with pytest.raises(RequestError, match="not text"):
        standard_input()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RequestError, match="closed"):
        standard_input()

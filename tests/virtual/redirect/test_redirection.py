"""A virtual run leaves the user's files as they are, however its script writes, and the script sees what it wrote."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_build import TONNAGE, needs_cuda_build
from forked_runs import run_forked
from virtual.redirect import ways

WAYS = Path(ways.__file__)


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The mode, time and hash of every file, folder and link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, hashlib.sha256(text).hexdigest())
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training folder, as in a user's home."""
    made = tmp_path / "training"
    made.mkdir()
    ways.prepare(made)
    return made


@pytest.mark.parametrize("name", [way.__name__ for way in ways.WITHOUT_TORCH])
def test_way_of_writing_leaves_files_unchanged(name: str, folder: Path) -> None:
    before = contents(folder)
    done = subprocess.run(
        [sys.executable, WAYS, "--without-torch", name], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before


@needs_cuda_build
@pytest.mark.parametrize("name", [way.__name__ for way in ways.WITH_TORCH])
def test_way_of_saving_a_training_leaves_files_unchanged(name: str, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    figures = tmp_path / "answer.json"
    done = run_forked(
        TONNAGE, ["run", "--gpu", "h200", "--json", str(figures), str(WAYS), name], timeout_s=120, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
    writes = json.loads(figures.read_text())["writes"]
    assert writes["fate"] == "discarded"
    assert writes["written_count"] > 0

"""A virtual run leaves the user's files as they are, however its script writes, and the script sees what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_build import TONNAGE, needs_cuda_build
from exports import ENGINES
from forked_runs import run_forked
from virtual.redirect import ways
from virtual.redirect.folders import contents

WAYS = Path(ways.__file__)


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


def test_script_that_begins_again_finds_the_original_files(folder: Path) -> None:
    before = contents(folder)
    script = """
import os, shutil
from pathlib import Path
from tonnage.virtual.redirect import Redirection

with Redirection() as redirection:
    shutil.rmtree("checkpoints")
    Path("model.pt").write_bytes(b"first")
    redirection.empty()
    assert Path("latest/trainer_state.json").exists()
    assert Path("model.pt").read_bytes() == b"the real weights"
    Path("model.pt").write_bytes(b"second")
print(*(os.path.basename(file.path) for file in redirection.writes.files))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["model.pt"], done.stderr
    assert contents(folder) == before


@needs_cuda_build
@pytest.mark.parametrize("name", [way.__name__ for way in ways.WITH_TORCH])
def test_way_of_saving_a_training_leaves_files_unchanged(name: str, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    figures = tmp_path / "answer.json"
    words = ["run", "--gpu", "h200", "--json", str(figures), str(WAYS), name]
    environment = dict(os.environ)
    if name == "deepspeed":
        if not (ENGINES / "deepspeed").exists():
            pytest.skip("DeepSpeed is not installed: make setup")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ENGINES)]))
    done = run_forked(TONNAGE, words, timeout_s=120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
    writes = json.loads(figures.read_text())["writes"]
    assert writes["fate"] == "discarded"
    assert writes["written_count"] > 0

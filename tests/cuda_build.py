"""`tonnage run` in the environment with a CUDA build of torch, which `make setup-cuda` makes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forked_runs import run_forked

ROOT = Path(__file__).parent.parent
TONNAGE = ROOT / ".venv-cuda" / "bin" / "tonnage"

needs_cuda_build = pytest.mark.skipif(
    not TONNAGE.exists(), reason="there is no .venv-cuda with a CUDA build of torch (make setup-cuda)"
)


def run(*words: str | Path, folder: Path, timeout_s: float = 240, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command's outcome; its figures go to answer.json in the folder."""
    command = ["run", "--json", str(folder / "answer.json"), *map(str, words)]
    return run_forked(TONNAGE, command, timeout_s=timeout_s, cwd=folder, **options)


def answer(folder: Path) -> dict[str, Any]:
    """What the last run in this folder said."""
    found: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return found

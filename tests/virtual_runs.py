"""`tonnage run` as a person types it, for tests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_runs import run_forked

SCRIPTS = Path(__file__).parent / "virtual" / "scripts"
TONNAGE = Path(sys.executable).with_name("tonnage")


def run_tonnage(*words: str, timeout_s: float = 240, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command's outcome; words of the script follow the script."""
    return run_forked(TONNAGE, list(words), timeout_s=timeout_s, **options)


def endings_in(output: str) -> dict[str, list[str]]:
    """How each program that judges_values.py ran ended: the error, and what it depends on."""
    line = next(line for line in output.splitlines() if line.startswith("ENDED "))
    found: dict[str, list[str]] = json.loads(line.removeprefix("ENDED "))
    return found

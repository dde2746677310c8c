"""`tonnage run` as a person types it, for tests."""

import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "virtual" / "scripts"
TONNAGE = Path(sys.executable).with_name("tonnage")


def run_tonnage(*words: str, timeout_s: float = 240, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command's outcome; words of the script follow the script."""
    return subprocess.run([str(TONNAGE), *words], capture_output=True, text=True, timeout=timeout_s, **options)

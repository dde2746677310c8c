"""Triton without a GPU, in processes of their own.

It lies apart from the other packages (`.venv/triton`, or where TONNAGE_TRITON points), for PyTorch behaves differently where
it can be imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRITON = Path(os.environ.get("TONNAGE_TRITON", ROOT / ".venv" / "triton"))
needs_triton = pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}")


def run_apart(tests: Path, **settings: str) -> None:
    """Run a file of tests; TRITON_INTERPRET="1" is Triton's interpreter."""
    environment = os.environ | {"PYTHONPATH": str(TRITON), "OMP_NUM_THREADS": "1"} | settings
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

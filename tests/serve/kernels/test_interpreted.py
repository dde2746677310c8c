"""The Triton kernels without a GPU: by Triton's interpreter, and compiled for a card, in processes of their own.

Triton lies apart from the other packages (`.venv/triton`, or where TONNAGE_TRITON points), for PyTorch behaves differently
where it can be imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRITON = Path(os.environ.get("TONNAGE_TRITON", ROOT / ".venv" / "triton"))


pytestmark = pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}")


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_kernels_agree_with_their_plain_versions(name: str) -> None:
    _run(name, TRITON_INTERPRET="1")


def test_kernels_compile_for_a_card(tmp_path: Path) -> None:
    _run("compiled_kernels.py", TRITON_CACHE_DIR=str(tmp_path))


def _run(name: str, **settings: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(TRITON), "OMP_NUM_THREADS": "1"} | settings
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/serve/kernels/{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""Large tensors of the host stay unwritten under a CUDA build of torch, and what is drawn after them is what torch draws."""

import subprocess
import sys
from pathlib import Path

from cuda_build import needs_cuda_build, run

pytestmark = needs_cuda_build
SCRIPTS = Path(__file__).parent / "scripts"


def test_what_is_drawn_next_is_what_torch_draws(tmp_path: Path) -> None:
    plain = subprocess.run([sys.executable, SCRIPTS / "draws.py"], capture_output=True, text=True, check=True)
    done = run("--gpu", "h200", SCRIPTS / "draws.py", folder=tmp_path)
    assert plain.stdout.startswith("drawn [") and plain.stdout.strip() in done.stdout + done.stderr


def test_known_values_decide_sizes_and_pass_through_a_group_of_one(tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPTS / "collects.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]

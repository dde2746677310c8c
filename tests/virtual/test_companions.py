"""Imports that the virtual GPU watches."""

import os
from pathlib import Path

import pytest

from cuda_build import needs_cuda_build
from cuda_build import run as run_cuda_build
from virtual_runs import SCRIPTS, run_tonnage


def check_first_touches(said: str) -> None:
    assert said.count("worked:") == 8, said[-3000:]


def test_every_part_of_the_compiler_can_be_imported_first() -> None:
    done = run_tonnage("run", "--gpu", "h200", str(SCRIPTS / "first_touch.py"))
    check_first_touches(done.stdout + done.stderr)


@pytest.mark.slow
@needs_cuda_build
def test_every_part_of_the_compiler_can_be_imported_first_in_a_cuda_build(tmp_path: Path) -> None:
    done = run_cuda_build("--gpu", "h200", SCRIPTS / "first_touch.py", folder=tmp_path)
    check_first_touches(done.stdout + done.stderr)


FIRST_IN_A_CHILD = """
import os, torch
child = os.fork()
if not child:
    print("in a bad fork:", torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_child_may_use_the_card_first_where_cuda_is_installed(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FIRST_IN_A_CHILD)
    done = run_tonnage("run", "--gpu", "h200", str(script), env={**os.environ, "CUDA_HOME": str(tmp_path)})
    assert "in a bad fork: False" in done.stdout + done.stderr, done.stderr[-1500:]


@needs_cuda_build
def test_a_child_may_use_the_card_first_in_a_cuda_build(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FIRST_IN_A_CHILD)
    done = run_cuda_build("--gpu", "h200", script, folder=tmp_path, fresh=True)
    assert "in a bad fork: False" in done.stdout + done.stderr, done.stderr[-1500:]

"""`tonnage record` where there is no GPU: words, and what to do instead. With one, see tests/gpu."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TONNAGE = str(Path(sys.executable).with_name("tonnage"))


def record(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([TONNAGE, "record", *words], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    done = record(str(script))
    assert done.returncode == 2
    assert "There is no CUDA GPU here to record on." in done.stderr
    assert "tonnage run --gpu" in done.stderr
    assert "never" not in done.stdout


def test_a_script_that_is_missing_is_named() -> None:
    done = record("nowhere.py")
    assert done.returncode == 2
    assert "There is no script at nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_lists_every_option() -> None:
    done = record("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("--output", "--force", "--json", "--events", "SCRIPT"))

"""Beyond the request that fails, under a CUDA build of torch: its own allocator asks twice, and then is granted."""

from pathlib import Path

import pytest

from cuda_build import answer, needs_cuda_build, run
from virtual_runs import SCRIPTS

pytestmark = needs_cuda_build
GIB = 2**30


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_it_goes_on_to_its_end(tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    done = run("--gpu", "4090", SCRIPTS / "runs_out.py", folder=tmp_path)
    said = answer(tmp_path)
    assert done.returncode == 1 and said["outcome"] == "oom", done.stderr[-2000:]
    assert said["oom"]["requested_bytes"] == 8 * GIB and said["oom"]["operator"] == "aten::empty"
    assert said["oom"]["allocated_bytes"] == said["peak_allocated_bytes"] == 16 * GIB
    assert said["total"]["peak_allocated_bytes"] == 32 * GIB
    assert "step 3" in done.stdout and "free True" in done.stdout


def test_a_script_that_catches_the_error_sees_it(tmp_path: Path) -> None:
    done = run("--gpu", "4090", SCRIPTS / "runs_out.py", "catches", folder=tmp_path)
    said = answer(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert said["ooms_caught"] == 2 and said["peak_allocated_bytes"] == 16 * GIB


def test_without_a_limit_nothing_fails(tmp_path: Path) -> None:
    done = run("--gpu", "all", SCRIPTS / "runs_out.py", "catches", folder=tmp_path)
    said = answer(tmp_path)
    assert "caught" not in done.stdout, done.stderr[-2000:]
    assert not next(row for row in said["cards"] if row["gpu_key"] == "rtx-4090")["fits"]

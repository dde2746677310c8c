"""Values that a script reads under a CUDA build of torch, and checks that fail by one."""

import json
from pathlib import Path

import pytest

from cuda_build import answer, needs_cuda_build, run
from virtual_runs import SCRIPTS

pytestmark = needs_cuda_build
PROGRAMS = sorted(path.stem for path in (SCRIPTS / "values").glob("*.py"))
KINDS = {"runs": (False, False), "depends": (True, True), "fails": (True, False)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How each program of the folder `values` ended, and on what its end depends; all in one run."""
    folder = tmp_path_factory.mktemp("values")
    done = run("--gpu", "h200", SCRIPTS / "judges_values.py", folder / "ended.json", folder=folder)
    assert (folder / "ended.json").exists(), done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads((folder / "ended.json").read_text())
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_an_error_that_depends_on_unknown_values_is_said_to(program: str, ended: dict[str, list[str]]) -> None:
    error, dependence = ended[program]
    assert (bool(error), bool(dependence)) == KINDS[program.partition("_")[0]], (error, dependence)


def test_an_adaptive_solver_by_numbers_ends_with_status_3(tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPTS / "values" / "depends_ode_numbers.py", folder=tmp_path)
    said = answer(tmp_path)
    assert done.returncode == 3 and said["outcome"] == "depends", done.stderr[-2000:]
    assert "underflow in dt" in said["depends_on"]["error"]
    assert said["depends_on"]["line"] == "depends_ode_numbers.py:11"
    assert said["peak_allocated_bytes"] > 0
    assert "script failed" not in done.stdout


def test_the_assumption_that_the_advice_names_lets_it_go_on(tmp_path: Path) -> None:
    script = SCRIPTS / "values" / "depends_raise_number.py"
    done = run("--gpu", "h200", "--assume", "depends_raise_number.py:4=0", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_assumed_values_hold_inside_the_block(tmp_path: Path) -> None:
    script = tmp_path / "assumes.py"
    script.write_text("""
import torch, tonnage
x = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
known = torch.tensor(7, device="cuda")
with tonnage.assume(flag=True, number=0.25):
    print((x > 0).any().item(), x.sum().item(), (x > 0).sum().item(), known.item(), bool(known == 8))
    with tonnage.assume(number=3):
        print(x.sum().item(), x.sum(0).tolist(), bool((x > 1).any()))
print((x > 0).any().item())
""")
    done = run("--gpu", "h200", script, folder=tmp_path)
    assert done.stdout.splitlines()[:3] == ["True 0.25 0 7 False", "3.0 [3.0, 3.0, 3.0, 3.0] True", "False"], (
        done.stderr
    )

"""Coverage of a package of three branches: what its processes ran, however they ended."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import coverage_probes  # noqa: E402

MODULE = '''
"""The module's docstring."""

from __future__ import annotations


def choose(number: int) -> str:
    """The function's."""
    if number > 1:
        return "large"
    for _ in range(number):
        return "one"
    return "none"
'''
FLOORS = "[tool.tonnage.coverage-floors]\nfit = {}\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package called tonnage, whose one module with statements has seven."""
    fit = tmp_path / "src" / "tonnage" / "fit"
    fit.mkdir(parents=True)
    (fit.parent / "__init__.py").touch()
    (fit / "__init__.py").touch()
    (fit / "choose.py").write_text(textwrap.dedent(MODULE).lstrip())
    return fit.parent


def run(package: Path, probes: dict[str, str], script: str) -> None:
    paths = os.pathsep.join([probes["PYTHONPATH"], str(package.parent)])
    environment = {**os.environ, **probes, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def lines_run(package: Path, script: str, capsys: pytest.CaptureFixture[str], floor: int = 0) -> tuple[str, list[str]]:
    folder = package.parents[1] / "probes"
    folder.mkdir()
    run(package, coverage_probes.prepare(package, folder), script)
    (package.parents[1] / "pyproject.toml").write_text(FLOORS.format(floor))
    below = coverage_probes.report(folder, package.parents[1])
    return capsys.readouterr().out, below


ONE = "from tonnage.fit.choose import choose; choose(1)"
FORKED = "import os; from tonnage.fit.choose import choose\nif os.fork() == 0: choose(2); os._exit(0)\nos.wait()"


def test_a_branch_that_was_not_taken_is_missing(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Seven statements: the import, the function, the two headers and three returns, of which one ran.
    said, below = lines_run(package, ONE, capsys, floor=72)
    assert "71.4 %" in said and below == ["fit"]


def test_what_a_process_ran_that_ends_without_its_exit_handlers_counts(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, below = lines_run(package, FORKED, capsys, floor=57)
    assert "57.1 %" in said and not below


def test_a_traceback_names_the_lines_of_the_source(package: Path, tmp_path: Path) -> None:
    (package / "fit" / "fails.py").write_text("def fail():\n    if True:\n        pass\n    raise OSError\n")
    folder = tmp_path / "probes"
    folder.mkdir()
    probes = coverage_probes.prepare(package, folder)
    script = "from tonnage.fit.fails import fail\ntry: fail()\nexcept OSError as error: trace = error.__traceback__"
    run(package, probes, script + "\nassert trace.tb_next.tb_lineno == 4")

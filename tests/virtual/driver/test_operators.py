"""Operators on the virtual card, held against the CPU: PyTorch's own database, and the lists of data/values.toml."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cuda_build import ROOT, needs_cuda_build, run
from virtual_runs import run_tonnage

SCRIPTS = Path(__file__).parent / "scripts"
DATABASE = ROOT / "tools" / "operator_database.py"
DIFFERENCES = tomllib.loads((Path(__file__).parent / "operator_differences.toml").read_text())["difference"]
CHECKS = [
    line.removeprefix("def ").partition("(")[0]
    for line in (SCRIPTS / "operators.py").read_text().splitlines()
    if line.startswith("def check_")
]
# Operators that differed once, where no GPU does.
REPAIRED = """
istft isin unique index_fill nonzero argwhere as_strided.partial_views linalg.ldl_factor linalg.ldl_factor_ex
linalg.ldl_solve linalg.eigvals masked_scatter put mvlgamma.mvlgamma_p_1 acos addcmul index_add unfold
ldexp logaddexp2 conj_physical multinomial
""".split()
# And each of so many others.
EVERY = 40

Completed = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, str]":
    """What the checks printed under a CUDA build."""
    done = run("--gpu", "h200", SCRIPTS / "operators.py", folder=tmp_path_factory.mktemp("operators"))
    return outcomes(done)


@pytest.fixture(scope="module")
def said_by_cpu_build() -> "dict[str, str]":
    return outcomes(run_tonnage("run", "--gpu", "h200", str(SCRIPTS / "operators.py")))


def outcomes(done: Completed) -> dict[str, str]:
    """The outcome of each check, by its name."""
    lines = [line.partition(" ") for line in done.stdout.splitlines() if line.startswith("check_")]
    assert lines, done.stderr[-2000:]
    return {name: outcome for name, _, outcome in lines}


@needs_cuda_build
@pytest.mark.parametrize("check", CHECKS)
def test_operators_do_what_scripts_ask_of_a_card(check: str, said: dict[str, str]) -> None:
    assert said[check] == "holds"


@pytest.mark.parametrize("check", CHECKS)
def test_they_do_so_under_a_cpu_build(check: str, said_by_cpu_build: dict[str, str]) -> None:
    assert said_by_cpu_build[check] == "holds"


@needs_cuda_build
def test_listed_operators_exist_and_their_values_are_those_of_the_cpu(tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPTS / "operator_lists.py", folder=tmp_path)
    assert printed_figures(done) == {"problems": [], "never known": []}


@needs_cuda_build
def test_chosen_operators_of_the_database_differ_only_where_a_gpu_does(tmp_path: Path) -> None:
    names = sorted({entry["operator"] for entry in DIFFERENCES} | set(REPAIRED))
    compare_with_list(tmp_path, "--every", str(EVERY), "--only", *names)


@needs_cuda_build
@pytest.mark.slow
def test_all_operators_of_the_database_differ_only_where_a_gpu_does(tmp_path: Path) -> None:
    figures = compare_with_list(tmp_path)
    assert figures["calls"] > 8000


def compare_with_list(folder: Path, *options: str) -> dict[str, Any]:
    """Run the database and hold its differences against the list, both ways."""
    figures = printed_figures(run("--gpu", "h200", DATABASE, *options, folder=folder, timeout_s=3600))
    unexpected = [row for row in figures["differences"] if not any(is_listed(row, entry) for entry in DIFFERENCES)]
    assert not unexpected
    listed = [entry for entry in DIFFERENCES if entry["operator"] in figures["operators"]]
    gone = [entry for entry in listed if not any(is_listed(row, entry) for row in figures["differences"])]
    assert not gone
    return figures


def printed_figures(done: Completed) -> dict[str, Any]:
    """The line of JSON that a script printed."""
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), "")
    assert line, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(line)
    return figures


def is_listed(row: dict[str, Any], entry: dict[str, str]) -> bool:
    return (row["operator"], row["kind"]) == (entry["operator"], entry["kind"]) and entry["says"] in row["detail"]

"""Values that nobody computed: what a script gets for them, and what it means if a check of the script fails by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.recording import read_recording
from tonnage.virtual import standins
from tonnage.virtual.standins import PATIENCE, EndlessLoop, StandIns
from virtual_runs import SCRIPTS, run_tonnage

PROGRAMS = sorted(path.stem for path in (SCRIPTS / "values").glob("*.py"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How each program of the folder `values` ended, and on what its end depends; all in one run."""
    file = tmp_path_factory.mktemp("values") / "ended.json"
    done = run_tonnage("run", "--gpu", "h200", str(SCRIPTS / "judges_values.py"), str(file))
    assert file.exists(), done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_an_error_that_depends_on_unknown_values_is_said_to(program: str, ended: dict[str, list[str]]) -> None:
    error, dependence = ended[program]
    kind = program.partition("_")[0]
    assert (bool(error), bool(dependence)) == {
        "runs": (False, False), "depends": (True, True), "fails": (True, False),
    }[kind], (error, dependence)  # fmt: skip


# The command: statuses, figures, and the way on


def run(script: str, folder: Path, *words: str) -> tuple[Any, dict[str, Any]]:
    figures = folder / "figures.json"
    done = run_tonnage(
        "run", "--gpu", "h200", "--json", str(figures), *words, str(SCRIPTS / "values" / script), cwd=folder
    )
    return done, json.loads(figures.read_text())


def test_a_raise_by_an_unknown_value_is_status_3_and_keeps_the_figures(tmp_path: Path) -> None:
    done, said = run("depends_raise_number.py", tmp_path, "-o", "run.tonnage")
    assert done.returncode == 3
    assert said["outcome"] == "depends" and said["fits"] is None and said["exit_status"] == 3
    assert said["peak_allocated_bytes"] > 0
    assert said["depends_on"]["line"] == "depends_raise_number.py:5"
    assert said["depends_on"]["assume"] == "depends_raise_number.py:4=0"
    assert "ValueError: diverged" in done.stderr  # the script's own traceback
    report = " ".join(done.stdout.split())
    assert "depends on unknown values" in report and "script failed" not in report
    assert "depends on values that a prediction does not have: depends_raise_number.py:5 raises an error" in report
    assert "--assume depends_raise_number.py:4=0" in report
    kept = read_recording(tmp_path / "run.tonnage")
    assert kept.header.outcome == "depends" and kept.dependence and kept.dependence.how == "raise"
    assert kept.dependence.line == said["depends_on"]["line"]
    assert [row.decides for row in kept.stand_ins] == [row["decides"] for row in said["stand_ins"]]
    assert "if at depends_raise_number.py:4" in [row["decides"] for row in said["stand_ins"]]
    shown = run_tonnage("show", str(tmp_path / "run.tonnage"))
    assert "depends on unknown values" in shown.stdout


def test_with_the_assumption_that_the_advice_names_the_run_goes_on(tmp_path: Path) -> None:
    _, said = run("depends_raise_number.py", tmp_path)
    done, said = run("depends_raise_number.py", tmp_path, "--assume", said["depends_on"]["assume"])
    assert done.returncode == 0 and said["outcome"] == "ok", done.stderr


def test_a_loop_that_waits_for_a_number_is_stopped(tmp_path: Path) -> None:
    done, said = run("depends_while_item.py", tmp_path)
    assert done.returncode == 3
    assert said["depends_on"]["how"] == "loop" and said["depends_on"]["line"] == "depends_while_item.py:5"
    assert said["depends_on"]["count"] == PATIENCE
    done, said = run("depends_while_item.py", tmp_path, "--assume", said["depends_on"]["assume"])
    assert done.returncode == 0 and "never" in done.stdout


def test_a_bug_beside_read_values_keeps_its_status(tmp_path: Path) -> None:
    done, said = run("fails_exit.py", tmp_path)
    assert done.returncode == 7 and said["outcome"] == "error" and said["depends_on"] is None


def test_an_assumption_that_is_not_used_is_named(tmp_path: Path) -> None:
    done, _ = run("runs_isnan.py", tmp_path, "--assume", "runs_isnan.py:1=true")
    assert "--assume runs_isnan.py:1: no unknown value was read there" in done.stderr


def test_an_assumption_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    done = run_tonnage("run", "--gpu", "h200", "--assume", "train.py=1", str(SCRIPTS / "raises.py"))
    assert done.returncode == 2 and "does not name a line and a value" in done.stderr


def test_certify_says_what_the_script_depends_on(tmp_path: Path) -> None:
    script = SCRIPTS / "values" / "depends_early_stopping.py"
    done = run_tonnage("certify", "--gpu", "h200", str(script), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "depends on values that a prediction does not have" in done.stderr and "--assume" in done.stderr


def test_ranks_that_depend_on_unknown_values_are_said_to(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    script = SCRIPTS / "values" / "depends_raise_number.py"
    done = run_tonnage("run", "--gpus", "2xh200", "--json", str(figures), str(script))
    said = json.loads(figures.read_text())
    assert done.returncode == 3, done.stderr
    assert said["outcome"] == "depends" and said["depends_on"]["line"] == "depends_raise_number.py:5"
    assert "depends on unknown values" in done.stdout and "script failed" not in done.stdout


def test_a_notebook_that_depends_on_unknown_values_is_said_to(tmp_path: Path) -> None:
    text = (SCRIPTS / "values" / "depends_raise_number.py").read_text()
    cell = {"cell_type": "code", "source": text.splitlines(keepends=True), "metadata": {}, "outputs": []}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}))
    done = run_tonnage("run", "--gpu", "h200", "train.ipynb", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "train.ipynb cell 1:5 raises an error" in " ".join(done.stdout.split())


# Placeholders


def test_numbers_fall_towards_one_and_flags_are_not_set() -> None:
    reads = StandIns(lambda: "train.py:1")
    numbers = [reads.read("Float", -1) for _ in range(3)]
    assert numbers == sorted(numbers, reverse=True) and min(numbers) > 1
    assert reads.read("Bool", -1) == 0 and reads.read("Long", -1) == 0
    assert reads.read("Float", 8) == 1


def test_a_loop_whose_rounds_are_alike_is_stopped_after_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s = iter(range(0, 10_000, 2))
    monkeypatch.setattr(standins.time, "monotonic", lambda: next(now_s))
    script = tmp_path / "waits.py"
    script.write_text("def wait(read):\n    while read() > 0.5:\n        pass\n")
    space: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    reads = StandIns(lambda: "waits.py:2", lambda: (7, 100))
    with pytest.raises(EndlessLoop):
        space["wait"](lambda: reads.read("Float", -1))
    assert reads.dependence and reads.dependence.how == "loop" and reads.dependence.line == "waits.py:2"
    assert reads.dependence.count < 1000


def test_a_loop_that_can_end_otherwise_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "def wait(read):\n    rounds = 0\n    while read() > 0.5 and rounds < 30_000:\n        rounds += 1\n    return rounds\n"
    )
    space: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    reads = StandIns(lambda: "waits.py:3")
    assert space["wait"](lambda: reads.read("Float", -1)) == 30_000

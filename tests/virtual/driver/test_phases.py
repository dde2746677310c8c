"""Phases under a CUDA build of torch, where blocks are learnt of in bunches: those of a CPU build, to the byte."""

from pathlib import Path

import pytest

from cuda_build import ROOT, answer, needs_cuda_build, run
from virtual_runs import run_tonnage

pytestmark = needs_cuda_build
SCRIPT = ROOT / "tests" / "script" / "programs" / "evaluates.py"
VOCABULARY = "2000"  # logits of all evaluation batches are small


def test_a_trainer_that_evaluates_and_saves(tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPT, VOCABULARY, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    here = answer(tmp_path)
    words = ("--json", str(tmp_path / "answer.json"), "--torch", here["torch_modelled"].partition("+")[0], str(SCRIPT))
    run_tonnage("run", "--gpu", "h200", *words, VOCABULARY)
    named = ("forward", "backward", "optimizer", "evaluation", "saving", "data")
    assert [here["phases"][name] for name in named] == [answer(tmp_path)["phases"][name] for name in named]
    assert any("evaluation batches" in line for line in here["outlook"])


def test_a_compiled_function_is_a_step_with_categories_and_a_time(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "compiled_function.py"
    done = run("--gpu", "h200", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = answer(tmp_path)
    ledger, weights, batch = said["ledger"], 2 * 4 * 1024**2, 4 * 4096 * 1024
    assert ledger["parameters"] == weights
    assert 2 * weights <= ledger["optimizer_states"] < 2 * weights + 4096
    assert ledger["inputs"] == 2 * batch
    assert ledger["activations"] >= 3 * batch  # of both products and the function between them
    assert "other" not in ledger
    assert [row["step"] for row in said["steps"]] == [0, 1, 2, 3]
    assert said["samples_per_s"] * said["step_time_s"] == pytest.approx(4096)

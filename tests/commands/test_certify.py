"""`tonnage certify` as a person types it."""

import json
from pathlib import Path

import pytest

from virtual_runs import run_tonnage

SCRIPT = str(Path(__file__).parents[1] / "certify" / "scripts" / "lengths.py")


def test_a_training_that_survives_is_called_safe() -> None:
    done = run_tonnage("certify", "--gpu", "4090", SCRIPT, "--steps", "15")
    assert done.returncode == 0, done.stderr
    assert "safe, at most" in done.stdout and "15 steps with batches of 4 shapes" in done.stdout
    assert "step 15" in done.stderr, "the script's own words go to standard error"
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_one_that_dies_names_the_step_and_what_would_save_it() -> None:
    done = run_tonnage("certify", "--gpu", "4090", "--json", "-", SCRIPT, "--steps", "15", "--cap", "30")
    figures = json.loads(done.stdout)
    assert done.returncode == 1 and figures["verdict"] == "dies"
    assert figures["part"]["kind"] == "step" and figures["part"]["shape"][0] == 4
    assert figures["failure"]["line"].startswith("lengths.py:") and figures["needs_bytes"] > 0
    run = json.loads(run_tonnage("run", "--gpu", "4090", "--json", "-", SCRIPT, "--steps", "15", "--cap", "30").stdout)
    assert run["oom"]["step"] == figures["part"]["step"] and run["oom"]["line"].startswith(
        figures["failure"]["line"].split()[0]
    )


def test_steps_and_epochs_can_be_limited() -> None:
    done = run_tonnage("certify", "--gpu", "4090", "--steps", "3", SCRIPT)
    assert done.returncode == 0 and "\n  3 steps" in done.stdout
    # Its evaluations walk through their own data many times, which are no epochs.
    done = run_tonnage("certify", "--gpu", "4090", "--epochs", "2", SCRIPT, "--steps", "11", "--epochs", "4")
    assert done.returncode == 0 and "\n  22 steps" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h300", SCRIPT], "There is no GPU called 'h300'"),
        (["--gpu", "h200", "missing.py"], "There is no script at missing.py"),
        (["--gpu", "h200", "--steps", "-1", SCRIPT], "1 or more"),
        (["--gpu", "h200", "torchrun", "--nproc-per-node", "2", SCRIPT], "launches several"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str) -> None:
    done = run_tonnage("certify", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_script_that_trains_nothing_is_sent_to_run(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import torch\ntorch.zeros(8, device='cuda')\n")
    done = run_tonnage("certify", "--gpu", "h200", str(script))
    assert done.returncode == 2 and "tonnage run" in done.stderr

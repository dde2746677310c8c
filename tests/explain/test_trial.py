"""Changes that are run: the script of a virtual run again, with a flag or a setting changed."""

import json
from pathlib import Path

import pytest

from tonnage.explain.fixes import Fix
from tonnage.explain.trial import ScriptChange, change_of, tried
from tonnage.recording import Recording, read_recording
from virtual_runs import run_tonnage

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
batch = parser.parse_args().batch
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)).cuda()
for _ in range(2):
    model(torch.randn(batch * 1024, 2048, device="cuda")).square().mean().backward()
    model.zero_grad()
"""


def fix(how: str) -> Fix:
    return Fix("a change", 1, "nothing", how)


@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        ("--batch 8", ("--batch", "16", "-v"), ("--batch", "8", "-v")),
        ("--batch=8", ("-v", "--batch=16"), ("-v", "--batch=8")),
    ],
)
def test_a_flag_of_the_script_is_put_in_its_place(how: str, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    assert change_of(fix(how), before) == ScriptChange(after, {})


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_setting_goes_into_the_environment(variable: str) -> None:
    change = change_of(fix(f"{variable}=expandable_segments:True"), ("x",))
    assert change == ScriptChange(("x",), {variable: "expandable_segments:True"})


@pytest.mark.parametrize("how", ["torch.utils.checkpoint on each layers.*", "and accumulate gradients over two", ""])
def test_a_change_of_the_script_s_text_is_not_run(how: str) -> None:
    assert change_of(fix(how), ("--batch", "16")) is None


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    (folder / "train.py").write_text(SCRIPT)
    target = folder / "run.tonnage"
    done = run_tonnage("run", "--gpu", "h200", "-o", str(target), str(folder / "train.py"), "--batch", "16")
    assert done.returncode == 0, done.stderr
    return target


def test_half_the_batch_saves_what_the_run_with_half_the_batch_saves(kept: Path) -> None:
    done = run_tonnage("explain", "--json", "-", str(kept))
    (half,) = [fix for fix in json.loads(done.stdout)["fixes"] if fix["name"] == "half the batch"]
    answer = kept.with_name("half.json")
    run_tonnage("run", "--gpu", "h200", "--json", str(answer), str(kept.with_name("train.py")), "--batch", "8")
    peaks = read_recording(kept).peak_allocated_bytes, json.loads(answer.read_text())["peak_allocated_bytes"]
    assert half["was_run"]
    assert half["saves_bytes"] == peaks[0] - peaks[1]
    assert "running it with --batch 8" in done.stderr


def test_nothing_runs_where_it_was_asked_not_to(kept: Path) -> None:
    done = run_tonnage("explain", "--no-run", "--json", "-", str(kept))
    assert not any(fix["was_run"] for fix in json.loads(done.stdout)["fixes"])
    assert "running it" not in done.stderr


def test_a_script_that_is_gone_leaves_the_computed_figures(kept: Path) -> None:
    recording: Recording = read_recording(kept)
    recording.header.script = str(kept.with_name("gone.py"))
    fixes = (fix("--batch 8"),)
    assert tried(recording, fixes) == fixes

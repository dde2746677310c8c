"""`benchmarks/grpo.py` trains on what the engine generates, with one copy of the weights."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchvision_names  # noqa: F401
from virtual_runs import run_tonnage

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grpo.py"
TINY = "--tiny --device cpu --prompts 4 --group 4 --prompt 8 --completion 12 --steps 1".split()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_grpo", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "words",
    ["", "--reference copy --loss chunked", "--lora 4 --reference adapters-off", "--no-sleep --checkpoint full"],
)
def test_every_phase_is_run_and_planned(benchmark: ModuleType, tmp_path: Path, words: str) -> None:
    benchmark.main([*TINY, *words.split(), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["measured"]) == set(found["planned"]) - {"blocks"}
    assert ("reference" in found["measured"]) == ("reference" in words)


def test_rewards_rise(benchmark: ModuleType) -> None:
    options = benchmark._parser().parse_args(
        [*TINY, "--prompts", "8", "--group", "8", "--micro-batch", "64", "--learning-rate", "0.01"]
    )
    shape = benchmark.from_config(benchmark.TINY, "tiny")
    loop = benchmark.Loop(benchmark.TINY, options, benchmark.torch.device("cpu"), benchmark.predicted(shape, options))
    rewards = [loop.step() for _ in range(16)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_a_plan_alone_runs_nothing(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark.main(["--plan", "--prompts", "4", "--completion", "64"])
    assert "measured" not in found and "train actor" in capsys.readouterr().out


def test_on_the_virtual_gpu_every_phase_is_within_3_percent_of_its_plan(tmp_path: Path) -> None:
    words = "--prompts 2 --group 8 --prompt 124 --completion 4 --micro-batch 16 --reference copy --steps 1 --eager"
    done = run_tonnage(
        "run",
        "--write",
        "--gpu",
        "h200",
        str(SCRIPT),
        *words.split(),
        "--out",
        str(tmp_path / "out.json"),
        timeout_s=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    for name, measured in found["measured"].items():
        assert found["planned"][name]["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.03), name
        assert found["planned"][name]["reserved_bytes"] == pytest.approx(measured["reserved_bytes"], rel=0.05), name


MEASURED = json.loads((SCRIPT.parent / "results" / "grpo-h200.json").read_text())["runs"]


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: run["words"])
def test_the_peak_is_what_an_h200_measured(benchmark: ModuleType, run: dict[str, Any]) -> None:
    options = benchmark._parser().parse_args(run["words"].split())
    planned = benchmark.planned_figures(benchmark.predicted(benchmark.find_model(options.model), options))
    phase, measured = max(run["phases"].items(), key=lambda pair: pair[1]["allocated_mib"])
    assert planned[phase]["allocated_bytes"] == pytest.approx(measured["allocated_mib"] * 2**20, rel=0.03)
    assert planned[phase]["reserved_bytes"] == pytest.approx(measured["reserved_mib"] * 2**20, rel=0.06)

"""The planner beside the virtual cluster: the same request in some layouts, small; and ZeRO's published table."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
# By name: fewer GPUs and what of the request goes with their number.
FEWER = {
    "ZeRO-3": ("2xh200", "--zero 3 --precision bf16-mixed --micro-batch 4"),
    "tensor, sequence": ("2xh200", "--zero 0 --tp 2 --precision bf16 --micro-batch 8"),
    "pipeline": ("2xh200", "--zero 0 --pp 2 --precision bf16 --micro-batch 4 --global-batch 16"),
    "ZeRO-2 × pipe": ("4xh200", "--zero 2 --pp 2 --precision bf16-mixed --micro-batch 4 --global-batch 24"),
}
# Of a few layers, whose holes in the allocator the planner knows least: what tensors take agrees as everywhere.
WASTED = {
    "ZeRO-1", "all three, first stage", "tensor × pipe, first stage", "full", "selective", "every-2", "chunked loss",
    "LoRA, full", "host optimizer", "host activations", "host states", "host inputs", "host all",
}  # fmt: skip


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """`benchmarks/cluster_layouts.py` with a smaller model."""
    folder = tmp_path_factory.mktemp("layouts")
    model = json.loads((BENCHMARKS / "layouts" / "llama.json").read_text())
    (folder / "llama.json").write_text(json.dumps(model | SMALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import cluster_layouts

        patch.setattr(cluster_layouts, "model_of", lambda layout: folder / f"{layout.model}.json")
        yield cluster_layouts


# What the planner says of ZeRO is also held to its published table.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "ZeRO-3" else ()) for n in FEWER])
def test_plan_and_run_agree(name: str, benchmark: ModuleType) -> None:
    gpus, words = FEWER[name]
    known = next(layout for layout in benchmark.LAYOUTS if layout.name == name)
    rows = benchmark.compare(replace(known, gpus=gpus, words=words), {})
    assert len(rows) == len(known.ends)
    for row in rows.values():
        assert abs(benchmark.difference(row, "peak_allocated_bytes")) <= 0.02


def test_kept_figures_agree(benchmark: ModuleType) -> None:
    kept = json.loads(benchmark.RESULTS.read_text())
    assert {name for layout in benchmark.LAYOUTS for name in benchmark.names_of(layout).values()} <= set(kept)
    assert len(benchmark.LAYOUTS) >= 30
    assert {"commit", "torch", "transformers"} <= set(kept["made"])
    for name, row in kept.items():
        if name not in ("ZeRO", "made"):
            assert abs(benchmark.difference(row, "peak_allocated_bytes")) <= 0.02, name
            bound = 0.18 if name in WASTED else 0.05
            assert abs(benchmark.difference(row, "peak_process_bytes")) <= bound, name


def test_kept_plans_are_those_of_today(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "model_of", lambda layout: BENCHMARKS / "layouts" / f"{layout.model}.json")
    kept = json.loads(benchmark.RESULTS.read_text())
    for layout in benchmark.LAYOUTS:
        for end, name in benchmark.names_of(layout).items():
            again = benchmark.figures(layout, {"best": {"config": kept[name]["plan"]["config"]}}, end)
            assert again["peak_allocated_bytes"] == kept[name]["plan"]["peak_allocated_bytes"], name


@pytest.mark.parametrize("stage", range(4))
def test_zero_s_published_table_from_the_planner(stage: int, benchmark: ModuleType) -> None:
    planned = benchmark.planned_states(stage) / 1e9
    assert round(planned, 1) == benchmark.PUBLISHED_GB[stage]
    kept = json.loads(benchmark.RESULTS.read_text())["ZeRO"][str(stage)]
    assert kept["plan_bytes"] == pytest.approx(benchmark.planned_states(stage), rel=1e-6)
    assert kept["run_bytes"] == pytest.approx(kept["plan_bytes"], rel=0.03)

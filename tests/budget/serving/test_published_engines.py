"""SGLang's pools and llama.cpp's buffers beside those that people's logs print."""

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FILE = Path(__file__).parents[3] / "benchmarks" / "planner_engines.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_engines", _FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.truth
def test_pools_of_sglang(benchmark: ModuleType) -> None:
    errors = [abs(predicted / logged - 1) for _, _, _, logged, predicted in benchmark.sglang_figures()]
    assert len(errors) >= 8
    assert statistics.median(errors) < 0.025
    assert max(errors) < 0.08


@pytest.mark.truth
def test_buffers_of_llama_cpp(benchmark: ModuleType) -> None:
    figures = list(benchmark.llama_figures())
    assert len({row for row, *_ in figures}) >= 15
    by_kind: dict[str, list[float]] = {}
    for _, _, what, logged, predicted in figures:
        by_kind.setdefault(what, []).append(abs(predicted / logged - 1))
    assert max(by_kind["card MiB"]) < 0.01
    assert max(by_kind["kv MiB"]) < 0.001
    assert max(by_kind["host mib"]) < 0.001
    assert statistics.median(by_kind["compute MiB"]) < 0.01
    assert max(by_kind["compute MiB"]) < 0.15

"""Public reports whose cause is known: it comes first in seventy of a hundred, and no wrong one is said as certain."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "explain_text.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = spec_from_file_location("explain_text_benchmark", BENCHMARK)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_cause_comes_first_in_seventy_of_a_hundred(benchmark: ModuleType) -> None:
    known, judged = benchmark.judged("known"), benchmark.judged("judged")
    assert len(known) == len(judged) == 50
    assert len({row.report["source"] for row in known + judged}) == 100
    assert sum(row.is_first for row in known + judged) >= 70
    assert sum(row.is_first for row in judged) >= 35
    assert [row.report["source"] for row in known + judged if row.is_wrongly_certain] == []


def test_reports_hold_facts_and_how_the_cause_was_established(benchmark: ModuleType) -> None:
    for report in benchmark.reports("known") + benchmark.reports("judged"):
        assert report["source"].count("#") == 1 and report["how"] and report["cause"] and report["wording"]

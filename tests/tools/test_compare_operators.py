"""The comparison of the virtual GPU with a card: verdicts, and what is shown of two sequences. No GPU, no torch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

TOOL = Path(__file__).parents[2] / "tools" / "compare_operators.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_operators", TOOL)
    assert spec and spec.loader
    module = sys.modules["compare_operators"] = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


tool = load_tool()


def alloc(size: int, ident: int) -> list[Any]:
    return ["alloc", size, ident]


def free(size: int, ident: int) -> list[Any]:
    return ["free", size, ident]


def row(events: list[list[Any]], **fields: Any) -> dict[str, Any]:
    base = {"group": "g", "index": 0, "op": "op", "case": "", "args": [], "outputs": [], "unmodelled": []}
    return {**base, "error": None, "differentiable": False, "events": events, **fields}


@pytest.mark.parametrize(
    ("real", "virtual", "verdict"),
    [
        ([alloc(1024, 0)], [alloc(1024, 0)], "exact"),
        ([alloc(4, 0), alloc(8, 1)], [alloc(8, 0), alloc(4, 1)], "same-peak"),
        ([alloc(4, 0)], [alloc(8, 0)], "same-peak"),
        ([alloc(512, 0), alloc(512, 1), free(512, 1)], [alloc(512, 0)], "different"),
        ([alloc(512, 0)], [alloc(512, 0), free(512, 0)], "different"),
        ([alloc(512, 0)], [[*alloc(512, 0), 7, "aten::add"]], "same-peak"),
    ],
)
def test_verdict(real: list[list[Any]], virtual: list[list[Any]], verdict: str) -> None:
    assert tool.compare(row(real), row(virtual)).verdict == verdict


def test_differences_are_of_the_virtual_gpu_in_blocks() -> None:
    result = tool.compare(row([alloc(100, 0)]), row([alloc(100, 0), alloc(513, 1), free(513, 1)]))
    assert (result.peak_difference_bytes, result.left_difference_bytes) == (1024, 0)


def test_what_cannot_be_compared() -> None:
    assert tool.compare(row([], error="RuntimeError: no"), row([])).verdict == "no-truth"
    assert tool.compare(row([]), row([], error="RuntimeError: no")).verdict == "error"
    assert tool.compare(row([]), None).verdict == "error"
    changed = row([], args=[{"shape": [2], "dtype": "float32", "grad": False}])
    assert tool.compare(row([]), changed).verdict == "no-truth"


def test_a_late_free_of_the_first_call_does_not_count() -> None:
    late = row([alloc(512, 0)], differentiable=True)
    assert tool.compare(late, row([free(4096, -1), alloc(512, 0)])).verdict == "exact"


def test_a_crash_counts_for_forward_and_backward() -> None:
    truth = [row([]), row([], op="op backward")]
    crash = {"group": "g", "index": 0, "begun": "op", "case": "", "error": "CRASHED (exit -11)"}
    results = tool.compare_all(truth, {("g", 0, ""): crash})
    assert [r.verdict for r in results] == ["error", "error"]


sizes = st.lists(st.integers(1, 1 << 30), max_size=12)


@given(sizes, sizes)
def test_every_event_is_shown_or_counted(real: list[int], virtual: list[int]) -> None:
    both = [[alloc(size, i) for i, size in enumerate(side)] for side in (real, virtual)]
    lines = tool.side_by_side(*both)
    assert len(lines) >= max(len(real), len(virtual)) or any("the same" in line for line in lines)
    assert any(line.lstrip().startswith("*") for line in lines) == (real != virtual)


@given(sizes)
def test_the_peak_is_never_below_what_is_left(given_sizes: list[int]) -> None:
    events = [alloc(size, i) for i, size in enumerate(given_sizes)] + [
        free(s, i) for i, s in enumerate(given_sizes[::2])
    ]
    peak, left = tool.peak_and_left_bytes(events)
    assert peak >= left >= 0

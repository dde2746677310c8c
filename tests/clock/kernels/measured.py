"""Launches with their measured times, as the tool that fits the figures reads them."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_TOOLS = str(Path(__file__).parents[3] / "tools")
sys.path.append(_TOOLS)
import fit_clock_compute as tool  # noqa: E402

sys.path.remove(_TOOLS)  # a test package has the name of a tool


@cache
def cases() -> tuple[Any, ...]:
    """Of kernels and of trainings, only those that nothing was fitted to."""
    return tuple(case for case in (*tool.probed(), *tool.trained()) if case.judged)


def errors(kind: str, *precisions: str) -> np.ndarray:
    """Of single kernels: how far off, in shares of the measured time."""
    found = [
        case for case in cases()
        if case.launch.kind == kind and not case.training and (not precisions or case.launch.precision in precisions)
    ]  # fmt: skip
    assert len(found) > 10
    return np.array([abs(tool.predicted(case) / case.seconds - 1) for case in found])


def errors_of_trainings(kind: str) -> np.ndarray:
    """Of the sum over all launches of that kind in a training."""
    sums: dict[str, list[float]] = {}
    for case in cases():
        if case.launch.kind == kind and case.training:
            told, taken = sums.setdefault(case.training, [0.0, 0.0])
            sums[case.training] = [told + tool.predicted(case) * case.calls, taken + case.seconds * case.calls]
    return np.array([abs(told / taken - 1) for told, taken in sums.values()])

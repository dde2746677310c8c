"""A few of the promises that `benchmarks/savings` measures, where that takes seconds."""

import importlib.util
from pathlib import Path

import pytest

from virtual_runs import run_tonnage

pytest.importorskip("torch")
_SOURCE = Path(__file__).parents[2] / "benchmarks" / "savings" / "measure.py"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("savings_measure", _SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.tonnage = forked
    return module


def forked(*words: str, **environment: str) -> None:
    """Run a command of the measurement as a fork of a process that has torch, which is seconds faster."""
    assert not environment
    done = run_tonnage(*words)
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize(
    ("script", "switches"),
    [
        ("segment_kept", {"autocast", "free-gradients"}),
        ("encoder_eager", {"checkpoint", "batch"}),
        ("mlp_wide", {"fused"}),
    ],
)
def test_a_promised_saving_is_saved(measure, script: str, switches: set[str], tmp_path: Path) -> None:
    rows = [
        row
        for row in measure.compare(script, tmp_path, "a100-40", frozenset(switches))
        if row["saved_bytes"] is not None
    ]
    assert len(rows) == len(switches)
    for row in rows:
        assert row["promised_bytes"] == pytest.approx(row["saved_bytes"], rel=measure.WITHIN), row

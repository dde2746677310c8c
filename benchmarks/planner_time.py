"""Hold the planner's step times against what was measured, and against published throughput.

    .venv/bin/python benchmarks/planner_time.py [--truth FOLDER] [--fit]

The first table is the bar: each phase of ten steps on an H200. Beside each step stands what the model says of it when it is
calibrated on the other nine alone. `--fit` prints the constants that all ten give: those of `budget/data/calibration.toml`.
The second table is information: published runs on other clusters, with no constant fitted to any of them.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published_training import NotSaid, case_of
from scipy.optimize import least_squares

from tonnage.budget.configuration import Configuration
from tonnage.budget.roofline import Calibration, calibration
from tonnage.budget.step_time import StepTime, step_time
from tonnage.errors import TonnageError
from tonnage.hardware import find_cluster
from tonnage.models import ModelShape, find_model

TRUTH = Path(__file__).parent / "truth"
MODELS = {"llama-1b": "llama-3.2-1b", "llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}
FITTED = (
    "matmul_ceiling",
    "matmul_unaligned",
    "memory_ceiling",
    "host_forward_s_per_layer",
    "host_backward_s_per_layer",
    "host_checkpoint_s_per_layer",
)
PHASES = ("forward", "backward", "optimizer")

Row = dict[str, Any]


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=TRUTH, help="the folder of measurements")
    parser.add_argument("--fit", action="store_true", help="print the constants that the rows give")
    options = parser.parse_args()
    rows = json.loads((options.truth / "steptime.json").read_text("utf-8"))
    if options.fit:
        fitted = fit(rows)
        print("\n".join(f"{name:32} {getattr(fitted, name):.4g}" for name in FITTED))
    measured_table(rows)
    published_table(options.truth / "published-training.jsonl")


def measured_table(rows: list[Row]) -> None:
    """Milliseconds by phase, predicted beside measured; the step, and the step without its own row."""
    errors, alone = [], []
    print(f"{'':28}{'forward':>15}{'backward':>16}{'optimizer':>13}{'step':>8}{'alone':>7}")
    for number, row in enumerate(rows):
        measured_s = sum(row["ms"].values()) / 1e3
        time = predicted(row, calibration())
        held_out = predicted(row, fit(rows[:number] + rows[number + 1 :]))
        errors.append(float(time.total_s) / measured_s - 1)
        alone.append(float(held_out.total_s) / measured_s - 1)
        print(f"{name_of(row):28}{phases(row, time)}{errors[-1]:+8.1%}{alone[-1]:+7.1%}")
    for words, found in (("all rows", errors), ("each row left out", alone)):
        sizes = [abs(error) for error in found]
        print(f"calibrated on {words}: median {median(sizes):.1%}, worst {max(sizes):.1%}")


def name_of(row: Row) -> str:
    """The case in a few words."""
    again = " full" if row["checkpoint"] else ""
    return f"{row['size']} {row['precision']} {row['batch']}×{row['seq']}{again}"


def phases(row: Row, time: StepTime) -> str:
    """Predicted and measured milliseconds of each phase."""
    found = by_phase(time)
    widths = (15, 16, 13)
    cells = [f"{found[name] * 1e3:.1f}/{row['ms'][name]:.1f}" for name in PHASES]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def by_phase(time: StepTime) -> dict[str, float]:
    """As the clock of a script sees them: what is recomputed is so in the backward pass."""
    parts = {name: float(value) for name, value in time.parts.items()}
    return parts | {"backward": parts["backward"] + parts["recompute"]}


def predicted(row: Row, shares: Calibration) -> StepTime:
    """What the model says of a measured row."""
    return step_time(shape_of(row), configuration_of(row), find_cluster("h200"), shares)


def shape_of(row: Row) -> ModelShape:
    """The preset that the row trained."""
    shape = find_model(MODELS.get(row["size"], row["size"]))
    assert shape.parameters == row["params"], row["size"]
    return shape


def configuration_of(row: Row) -> Configuration:
    """How the row was trained."""
    return Configuration(
        precision="bf16-mixed" if row["precision"] == "amp" else "bf16",
        optimizer_kernel="fused",
        checkpoint="full" if row["checkpoint"] else "none",
        seq=row["seq"],
        micro_batch=row["batch"],
    )


def fit(rows: list[Row]) -> Calibration:
    """The constants under which the logarithms of forward and backward times err least; few outliers weigh little."""
    start = calibration()

    def errors(logarithms: "np.ndarray[Any, Any]") -> list[float]:
        shares = replace(start, **dict(zip(FITTED, np.exp(logarithms), strict=True)))
        return list(_log_errors(rows, shares))

    first = np.log([getattr(start, name) for name in FITTED])
    found = least_squares(errors, first, loss="soft_l1", f_scale=0.1)
    return replace(start, **dict(zip(FITTED, map(float, np.exp(found.x)), strict=True)))


def _log_errors(rows: list[Row], shares: Calibration) -> Iterator[float]:
    for row in rows:
        found = by_phase(predicted(row, shares))
        for name in ("forward", "backward"):
            yield float(np.log(found[name] * 1e3 / row["ms"][name]))


def published_table(path: Path) -> None:
    """Tokens a second and GPU: predicted, reported. Nothing is fitted to these."""
    errors: dict[str, list[float]] = {}
    print("\npredicted reported tokens/s a GPU")
    for row in map(json.loads, path.read_text("utf-8").splitlines()):
        if not row.get("tokens_per_s_per_gpu"):
            continue
        try:
            case = case_of(row)
            cluster = case.cluster()
        except (NotSaid, TonnageError):
            continue
        time = step_time(case.shape, case.configuration, cluster)
        speed = float(time.tokens_per_s) / cluster.gpus
        error = speed / row["tokens_per_s_per_gpu"] - 1
        errors.setdefault(row["family"], []).append(error)
        print(
            f"{speed:9.0f} {row['tokens_per_s_per_gpu']:8.0f} {error:+7.0%}  {row['id']:22} {words_of(case.configuration)}"
        )
    for family, found in errors.items():
        print(f"{family:20} {len(found):3} runs, median {median(found):+.0%}, of sizes {median(map(abs, found)):.0%}")


def words_of(c: Configuration) -> str:
    """The configuration in a few words."""
    return f"dp{c.data} tp{c.tp} pp{c.pp} cp{c.cp} zero{c.zero} batch {c.micro_batch}×{c.accumulate} × {c.seq} {c.checkpoint}"


if __name__ == "__main__":
    main()

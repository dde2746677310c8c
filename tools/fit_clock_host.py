"""Fit what the host takes for operators and launches: `python tools/fit_clock_host.py FOLDER`, then copy into clock/data/host.toml.

FOLDER holds recordings of the trainings of benchmarks/steps (see benchmarks/steps/judge.py). What a phase of each took on a quiet
core (tools/probe_host.py) is the sum of its calls and launches; a weak pull towards what profiled calls took keeps figures that
few rows tell apart from wild values. Phases of steps on cores as they are lent (benchmarks/steps/measure.py) count as well, divided
by how much longer the host takes there: `shared`. Nothing is fitted to steps that are only judged by.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from tonnage.clock.captured import CapturedStep
from tonnage.clock.step import launches_of, settings_of
from tonnage.clock.timeline import QUEUE_LENGTH
from tonnage.recording import read_recording

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# In microseconds: what a profiled call took on average, and how strongly that pulls.
PROFILED = {
    "forward": {"operator": 7, "inner_operator": 1.5, "launch": 8, "further_kernel": 4.5, "attention": 40, "convolution": 30, "matmul": 10,
                "recurrent": 6},
    "backward": {"operator": 2, "inner_operator": 1, "launch": 8, "further_kernel": 4.5, "attention": 40, "convolution": 45, "matmul": 18,
                 "recurrent": 6},
    "optimizer": {"operator": 3, "inner_operator": 2, "launch": 8, "further_kernel": 4.5, "parameter": 5, "step": 200},
}  # fmt: skip
PULL = 0.1
FIRM = ("forward", "backward"), "further_kernel"  # the driver's own call: no step has enough of them to tell
QUIET = 1.2  # times the usual pace of a quiet core
WAITS = 0.9  # the host's share of a step that waits for it


def counts(step: CapturedStep) -> dict[str, Counter[str]]:
    """What each phase has of everything."""
    found = {phase: Counter[str]() for phase in PROFILED}
    found["optimizer"] = Counter(step=1, parameter=step.optimizer_parameters)
    for moment, launch in launches_of(step, settings_of(step)):
        phase = "optimizer" if moment.phase == "optimizer" else "backward" if moment.thread else "forward"
        # Recomputed calls are timed with the backward pass, at the price of a forward's.
        row = found[phase]
        if moment.phase == "recompute":
            row["recomputed"] += 1
        if moment.call.kind == "operator":
            row["inner_operator" if moment.is_inner else "operator"] += 1
        if launch is not None:
            if launch.kind == "recurrent":
                row["recurrent"] += launch.kernels
            else:
                row.update({"launch": 1, "further_kernel": launch.kernels - 1, launch.kind: 1})
    return found


def fit(phase: str, rows: list[Counter[str]], seconds: list[float]) -> np.ndarray:
    """Microseconds of each, by least squares on relative errors; rows far off count less."""
    guess = np.array(list(PROFILED[phase].values()))
    pull = np.array([100 * PULL if phase in FIRM[0] and name == FIRM[1] else PULL for name in PROFILED[phase]])
    wanted = np.array([[row[name] for name in PROFILED[phase]] for row in rows]) * 1e-6 / np.array(seconds)[:, None]
    figures = guess
    for _ in range(20):
        weights = np.maximum(0.05, abs(wanted @ figures - 1)) ** -0.5
        weights /= weights.mean()
        figures, _ = nnls(
            np.vstack([wanted * weights[:, None], np.diag(pull / guess)]),
            np.concatenate([weights, pull]),
        )
    errors = abs(wanted @ figures - 1)
    print(f"[{phase}] {len(rows)} rows, median {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.1%}")
    print("\n".join(f"{name} = {value:.1f}e-6" for name, value in zip(PROFILED[phase], figures, strict=True)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    quiet = json.loads((RESULTS / "host-h200.json").read_text("utf-8"))["trainings"]
    pace_s = statistics.median(max(row["pace_s"]) for row in quiet.values())
    quiet = {name: row for name, row in quiet.items() if max(row["pace_s"]) < QUIET * pace_s}
    steps = json.loads((RESULTS / "steps-h200.json").read_text("utf-8"))["trainings"]
    usual = {name: row for name, row in steps.items() if not row["judged"] and len(row["runs_s"]) > 1}
    found = {name: counts(step) for name in quiet | usual if (step := captured(folder, name)) is not None}
    shared = statistics.median(
        usual[name]["host_s"][phase] / quiet[name]["host_s"][phase]
        for name in quiet.keys() & usual.keys()
        for phase in queued(found[name], steps[name])
    )
    print(f"shared = {shared:.2f}")
    for phase in PROFILED:
        rows, seconds = [], []
        for measured, factor in ((quiet, 1.0), (usual, shared)):
            for name in measured.keys() & found.keys():
                row = found[name][phase]
                # Small inputs have recurrent layers launch other kernels; scalers wait for the card; recomputing is no backward.
                fits = not ((row["recurrent"] and measured is quiet) or (phase == "optimizer" and "fp16" in name))
                if fits and not row["recomputed"] and (measured is quiet or phase in queued(found[name], steps[name])):
                    rows.append(row)
                    seconds.append(measured[name]["host_s"][phase] / factor)
        fit(phase, rows, seconds)


def queued(found: dict[str, Counter[str]], step: dict[str, Any]) -> list[str]:
    """The phases in which the host did not wait for the card to take its launches."""
    phases, launches = [], 0
    for phase in PROFILED:
        launches += sum(found[phase][name] for name in ("launch", "further_kernel", "recurrent"))
        if launches < QUEUE_LENGTH or sum(step["host_s"].values()) > WAITS * step["apart_s"]:
            phases.append(phase)
    return phases


def captured(folder: Path, name: str) -> CapturedStep | None:
    path = folder / f"{name}.tonnage"
    return read_recording(path).captured if path.exists() else None


if __name__ == "__main__":
    main()

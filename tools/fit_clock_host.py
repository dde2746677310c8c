"""Fit what the host takes for operators and launches: `python tools/fit_clock_host.py FOLDER`, then copy into clock/data/host.toml.

FOLDER holds recordings of the trainings of benchmarks/steps (see benchmarks/steps/judge.py). Only steps that waited for the host
count, and only those that nothing is judged by; a weak pull towards what single calls took keeps the few rows from wild figures.
"""

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from tonnage.clock.captured import CapturedStep
from tonnage.clock.step import launches_of, settings_of
from tonnage.recording import read_recording

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# In microseconds: what calls took alone (tools/probe_times.py), and how strongly they pull.
ALONE = {
    "operator": 15.0, "backward_operator": 3.0, "inner_operator": 2.5, "default": 11.0, "convolution": 45.0, "attention": 25.0,
    "recurrent": 14.0,
}  # fmt: skip
PULL = 0.1
WAITS = 1.25  # a step this much longer than its kernels waits for the host


def counts(step: CapturedStep) -> list[int]:
    found = Counter[str]()
    for moment, launch in launches_of(step, settings_of(step)):
        if moment.call.kind == "operator":
            found["inner_operator" if moment.is_inner else "backward_operator" if moment.thread else "operator"] += 1
        if launch is not None:
            found[launch.kind if launch.kind in ALONE else "default"] += launch.kernels
    return [found[name] for name in ALONE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    kernels_s: dict[str, float] = {}
    with gzip.open(RESULTS / "steps-operators-h200.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            kernels_s[row["training"]] = kernels_s.get(row["training"], 0.0) + row["gpu_s"]
    rows, seconds = [], []
    for name, measured in json.loads((RESULTS / "steps-h200.json").read_text("utf-8"))["trainings"].items():
        path = folder / f"{name}.tonnage"
        if measured["judged"] or not path.exists() or measured["step_s"] < WAITS * kernels_s[name]:
            continue
        step = read_recording(path).captured
        if step is not None:
            rows.append(counts(step))
            seconds.append((measured["step_s"] * measured["apart_s"]) ** 0.5)
    alone = np.array(list(ALONE.values()))
    wanted = np.array(rows) * 1e-6 / np.array(seconds)[:, None]
    figures, _ = nnls(
        np.vstack([wanted, PULL * np.diag(1 / alone)]), np.concatenate([np.ones(len(rows)), PULL * np.ones(len(alone))])
    )
    print("\n".join(f"{name} = {value:.1f}e-6" for name, value in zip(ALONE, figures, strict=True)))
    print("errors", [f"{error:+.0%}" for error in wanted @ figures - 1])


if __name__ == "__main__":
    main()

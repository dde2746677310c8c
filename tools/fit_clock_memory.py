"""Fit the figures of kernels that move bytes to measured times, and say how far off they are: data/memory.toml.

    python tools/fit_clock_memory.py            # report, over both halves
    python tools/fit_clock_memory.py --write    # fit, on the half that is not judged by, then report

Each form's figures are fitted alone, by the logarithm of predicted over measured time, with a slight pull towards where they
began: what no measurement decides stays as it was. Half of the probe's cases, and the trainings that are `judged`, are
only ever reported.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from memory_samples import Sample, predicted_s, probe_samples, step_samples
from scipy.optimize import least_squares

from tonnage.clock.kernels import memory
from tonnage.hardware import Gpu, find_gpu

DATA = Path(memory.__file__).parents[1] / "data" / "memory.toml"
PULL = 0.05
MOST = {"share": 0.92, "l2_share": 1.0, "resident": 1.0, "kept": 1.0}
MOST_WRITTEN = 1.0  # of bandwidth: writing alone comes closer to its peak
FIXED = {"passes", "kernel_s"}
UNMEASURED = {"fused", "fused_rows"}  # every training with such kernels is judged by
ROUNDS = 3


def fit(samples: list[Sample], gpu: Gpu) -> None:
    """All forms in turn, a few times, since a sample may have several."""
    tables = dict(_tables(memory.figures()))
    using = {path: [sample for sample in samples if _uses(sample, path)] for path in tables}
    everything_common = using["vector"] + using["written"] + using["mixed"]
    share = _shares(samples)
    for _ in range(ROUNDS):
        for path, table in tables.items():
            chosen = everything_common if path == "common" else using[path]
            if chosen and path not in UNMEASURED:
                _fit_table(table, chosen, share, gpu, MOST | ({"share": MOST_WRITTEN} if path == "written" else {}))


def _tables(found: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, dict[str, float]]]:
    """Tables of numbers, with the path to each."""
    for name, value in found.items():
        if all(isinstance(one, dict) for one in value.values()):
            yield from _tables(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _uses(sample: Sample, path: str) -> bool:
    family, _, name = path.rpartition(".")
    if family == "arithmetic":
        narrow = name == "narrow"
        costs = memory.figures()["arithmetic"][name]
        return any(
            one.variant in ("vector", "random") and one.name in costs and (one.precision in ("bf16", "fp16")) == narrow
            for one in sample.launches
        )
    return any(name in one.variant.split("+") for one in sample.launches)


def _shares(samples: list[Sample]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for sample in samples:
        total[sample.group] += sample.measured_s
    return total


def _fit_table(
    table: dict[str, float], samples: list[Sample], total: dict[str, float], gpu: Gpu, limits: dict[str, float]
) -> None:
    names = [name for name, value in table.items() if name not in FIXED and value > 0]
    begin = np.log([table[name] for name in names])
    most = np.array([np.log(limits.get(name, np.inf)) for name in names])
    # A sample of a step counts by its part of the step; the many of a probe count alike.
    weights = np.array(
        [1.0 if sample.gapped else 0.1 + 4.0 * (sample.measured_s / total[sample.group]) ** 0.5 for sample in samples]
    )

    def residuals(point: np.ndarray) -> np.ndarray:
        for name, value in zip(names, np.minimum(point, most), strict=True):
            table[name] = float(np.exp(value))
        errors = np.array([np.log(predicted_s(sample, gpu) / sample.measured_s) for sample in samples])
        return np.concatenate((errors * weights, PULL * (point - begin)))

    found = least_squares(
        residuals, np.minimum(begin, most - 1e-3), loss="soft_l1", f_scale=0.1, max_nfev=30, diff_step=1e-3
    )
    residuals(found.x)


# ── what is said ──


def report(samples: list[Sample], gpu: Gpu) -> None:
    by_kind, by_training = defaultdict(list), defaultdict(lambda: [0.0, 0.0])
    for sample in samples:
        expected_s = predicted_s(sample, gpu)
        if sample.gapped:
            by_kind[sample.judged, sample.group].append(abs(expected_s / sample.measured_s - 1))
        else:
            sums = by_training[sample.judged, sample.group]
            sums[0] += expected_s
            sums[1] += sample.measured_s
    for judged in (False, True):
        print("judged by:" if judged else "fitted to:")
        for (half, kind), errors in sorted(by_kind.items()):
            if half == judged:
                print(
                    f"  {kind:14}{len(errors):5} rows   median {np.median(errors):6.1%}   90th {np.quantile(errors, 0.9):6.1%}"
                )
        errors = []
        for (half, training), (expected_s, measured_s) in by_training.items():
            if half == judged:
                errors.append(abs(expected_s / measured_s - 1))
                print(f"  {training:40}{1e3 * measured_s:9.2f} ms {expected_s / measured_s - 1:+7.1%}")
        print(f"  {len(errors)} trainings   median {np.median(errors):.1%}   90th {np.quantile(errors, 0.9):.1%}")


def write(path: Path, found: dict[str, Any]) -> None:
    lines = [
        "# Figures of kernels that move bytes, fitted by tools/fit_clock_memory.py to times of an H200: seconds (_s), shares of a",
        "# card's peak rates, and cycles of one SM: for each element, access, block, row of a block's own (serial), round of loads.",
    ]
    for name, table in _tables(found):
        lines += ["", f"[{name}]", *(f"{key} = {value:.4g}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    tomllib.loads(path.read_text("utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    gpu, samples = find_gpu("h200"), probe_samples() + step_samples()
    if options.write:
        fit([sample for sample in samples if not sample.judged], gpu)
        write(DATA, memory.figures())
    report(samples, gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured times of an H200, over the half that no figure was fitted to."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from clock.kernels.calls import H200

_TOOLS = str(Path(__file__).parents[3] / "tools")
sys.path.append(_TOOLS)
from memory_samples import predicted_s, probe_samples, step_samples  # noqa: E402

sys.path.remove(_TOOLS)  # a test package has the name of a tool

pytestmark = pytest.mark.truth

# Median and 90th percentile of how far off a row is.
PROBES = {
    "conversions": (0.06, 0.20),
    "copies": (0.06, 0.33),
    "creation": (0.14, 0.29),
    "elementwise": (0.07, 0.18),
    "indexing": (0.10, 0.36),
    "losses": (0.08, 0.36),
    "norms": (0.10, 0.29),
    "optimizers": (0.13, 0.46),
    "reductions": (0.08, 0.34),
}


def test_rows_of_the_probe() -> None:
    errors = defaultdict(list)
    for sample in probe_samples():
        if sample.judged:
            errors[sample.group].append(abs(predicted_s(sample, H200) / sample.measured_s - 1))
    assert errors.keys() == PROBES.keys()
    for kind, (median, most) in PROBES.items():
        assert np.median(errors[kind]) < median and np.quantile(errors[kind], 0.9) < most, kind


def test_sums_of_trainings() -> None:
    predicted, measured = defaultdict(float), defaultdict(float)
    for sample in step_samples():
        if sample.judged:
            predicted[sample.group] += predicted_s(sample, H200)
            measured[sample.group] += sample.measured_s
    errors = [abs(predicted[training] / measured[training] - 1) for training in measured]
    assert len(errors) == 48 + 47 + 34 + 45
    assert np.median(errors) < 0.037 and np.quantile(errors, 0.9) < 0.22 and max(errors) < 0.4

"""The league's modules are scripts of `benchmarks`, found by their folder."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "league"), str(BENCHMARKS)]

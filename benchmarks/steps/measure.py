"""Measure the step times of all trainings on a real GPU: `python benchmarks/steps/measure.py --out FILE [NAME …]`.

Each training is timed over enough steps to fill a second after two that warm it up, as a median and as a mean: a card that
gets hot slows down. Half of the names, by their hash, are only ever judged by (`judged`), never used to choose a model's form.
"""

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from trainings import TRAININGS, Training, prepare

LEAST_S = 1.0


def is_judged(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def measure(training: Training) -> dict[str, Any]:
    began_s = time.perf_counter()
    step = prepare(training)
    for _ in range(3 if training.compiled else 2):
        step()
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began_s
    torch.cuda.reset_peak_memory_stats()
    each_s: list[float] = []
    while sum(each_s) < LEAST_S or len(each_s) < 5:
        started_s = time.perf_counter()
        step()
        launched_s = time.perf_counter() - started_s
        torch.cuda.synchronize()
        each_s.append(time.perf_counter() - started_s)
    started_s = time.perf_counter()
    for _ in range(len(each_s)):  # as people run them: the host may be a step ahead
        step()
    torch.cuda.synchronize()
    mean_s = (time.perf_counter() - started_s) / len(each_s)
    return {
        "step_s": mean_s, "apart_s": statistics.median(each_s), "launched_s": launched_s, "steps": len(each_s),
        "ready_s": round(ready_s, 1),
        "tokens": training.tokens, "samples": training.samples, "allocated_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=580.0, help="seconds after which nothing new is begun")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "trainings": {}}
    for name in arguments.names or TRAININGS:
        if time.perf_counter() - began_s > arguments.limit:
            break
        torch._dynamo.reset()
        try:
            row = measure(TRAININGS[name])
        except Exception as problem:
            row = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}"}
        found["trainings"][name] = row | {"judged": is_judged(name)}
        print(f"{time.perf_counter() - began_s:6.1f} {name} {row}", flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

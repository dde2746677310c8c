"""Measure the step times of all trainings on a real GPU: `python benchmarks/steps/measure.py --out FILE [NAME …]`.

Each training is timed over enough steps to fill a second after two that warm it up: one by one, as a median, and in a row, as
people run them. Half of the names, by their hash, are only ever judged by (`judged`), never used to choose a model's form.
`--operators FILE` profiles one more step of each and keeps which operator took how much of the card's time.
"""

import argparse
import gc
import gzip
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from trainings import TRAININGS, Training, prepare

LEAST_S = 1.0


def is_judged(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def measure(training: Training, operators: list[dict[str, Any]]) -> dict[str, Any]:
    began_s = time.perf_counter()
    step = prepare(training)
    for _ in range(3 if training.compiled else 2):
        step()
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began_s
    torch.cuda.reset_peak_memory_stats()
    each_s: list[float] = []
    while sum(each_s) < LEAST_S / 4 or len(each_s) < 5:
        started_s = time.perf_counter()
        step()
        launched_s = time.perf_counter() - started_s
        torch.cuda.synchronize()
        each_s.append(time.perf_counter() - started_s)
    steps = max(5, round(LEAST_S / statistics.median(each_s)))
    started_s = time.perf_counter()
    for _ in range(steps):  # as people run them: the host may be a step ahead
        step()
    torch.cuda.synchronize()
    mean_s = (time.perf_counter() - started_s) / steps
    operators.extend(profile(step))
    return {
        "step_s": mean_s, "apart_s": statistics.median(each_s), "launched_s": launched_s, "steps": steps,
        "ready_s": round(ready_s, 1),
        "tokens": training.tokens, "samples": training.samples, "allocated_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def profile(step: Callable[[], object]) -> list[dict[str, Any]]:
    """What one step launched: each operator with its shapes, its kernels, how often and for how long."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    on_host = torch.autograd.DeviceType.CPU
    # The runtime's own calls have numbers of their own, which may be the same; they are linked to an operator's.
    called = {
        event.correlation_id(): event
        for event in events
        if event.device_type() == on_host and not event.linked_correlation_id()
    }
    seconds, counts = Counter[str](), Counter[str]()
    for event in events:
        if event.device_type() == on_host or event.is_user_annotation():
            continue
        caller = called.get(event.linked_correlation_id())
        row = {"kernel": event.name()[:200]}
        if caller is not None:
            row |= {"op": caller.name(), "shapes": caller.shapes(), "types": caller.dtypes()}
        key = json.dumps(row)
        seconds[key] += event.duration_ns() / 1e9
        counts[key] += 1
    return [json.loads(key) | {"calls": counts[key], "gpu_s": seconds[key]} for key in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--operators", type=Path, help="where to keep each step's operators (.jsonl.gz)")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds after which nothing new is begun")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "trainings": {}}
    for name in arguments.names or TRAININGS:
        if time.perf_counter() - began_s > arguments.limit:
            break
        torch._dynamo.reset()
        operators: list[dict[str, Any]] = []
        try:
            row = measure(TRAININGS[name], operators)
        except Exception as problem:
            row = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}"}
        found["trainings"][name] = row | {"judged": is_judged(name)}
        print(f"{time.perf_counter() - began_s:6.1f} {name} {row}", flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        if arguments.operators:
            with gzip.open(arguments.operators, "at") as file:
                file.writelines(json.dumps({"training": name} | operator) + "\n" for operator in operators)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

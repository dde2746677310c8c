"""Measure the step times of all trainings on a real GPU: `python benchmarks/steps/measure.py --out FILE [NAME …]`.

Each training runs in a process of its own, as people run them (in one process for all, the host becomes slower as it goes), and
is timed over enough steps to fill most of a second after some that warm it up: one by one, as a median, and in a row. `host_s`
says when the host was through with each phase of a step that found the card idle. Who shares a core with someone else takes up to
1.7 times as long for the same calls, so `--times` repeats it in further processes: the median counts, and `runs_s` has all.
`--quiet` adds one that stays on the quietest core: `quiet_s` is what the step takes where nobody else is on the host.
Compiled ones are compiled side by side before the first is timed. `--operators FILE` profiles one more step of each and keeps
which operator took how much of the card's time.
"""

import argparse
import gzip
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).parent))
from trainings import JUDGED, TRAININGS, Training, prepare

LEAST_S = 0.7
CALLS = 1500  # that tell a core's pace
TOGETHER = 8  # compile at the same time
FORKS = multiprocessing.get_context("fork")


def measure(training: Training, operators: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The step's times, and its operators."""
    began_s = time.perf_counter()
    step = prepare(training)
    for _ in range(4 if training.compiled else 3):
        step()
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began_s
    torch.cuda.reset_peak_memory_stats()
    each_s, host_s = time_apart(step, LEAST_S / 3)
    steps = max(5, round(LEAST_S / statistics.median(each_s)))
    started_s = time.perf_counter()
    for _ in range(steps):  # as people run them: the host may be a step ahead
        step()
    torch.cuda.synchronize()
    mean_s = (time.perf_counter() - started_s) / steps
    row = {
        "step_s": mean_s, "apart_s": statistics.median(each_s), "steps": steps, "ready_s": round(ready_s, 1),
        "host_s": host_s, "pace_s": pace_s(),
        "tokens": training.tokens, "samples": training.samples, "allocated_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip
    return row, profile(step) if operators else []


def time_apart(step: Callable[..., object], least_s: float) -> tuple[list[float], dict[str, float]]:
    """Steps that each find the card idle: how long each took, and when the host was through with a phase, as a median."""
    each_s: list[float] = []
    host_s: defaultdict[str, list[float]] = defaultdict(list)
    while sum(each_s) < least_s or len(each_s) < 7:
        spent: Counter[str] = Counter()
        started_s = since_s = time.perf_counter()

        def mark(phase: str, spent: Counter[str] = spent) -> None:
            nonlocal since_s
            now_s = time.perf_counter()
            spent[phase] += now_s - since_s
            since_s = now_s

        step(mark)
        torch.cuda.synchronize()
        each_s.append(time.perf_counter() - started_s)
        for phase, seconds in spent.items():
            host_s[phase].append(seconds)
    return each_s, {phase: statistics.median(seconds) for phase, seconds in host_s.items()}


def pace_s(calls: int = 10_000) -> float:
    """How fast the host is just now: small calls on the processor, one after the other."""
    values = torch.ones(8)
    began_s = time.perf_counter()
    for _ in range(calls):
        values = values + 1
    return (time.perf_counter() - began_s) / calls


def go_to_quietest_core() -> float:
    """Stay there, and say how fast it is."""
    paces = {}
    for core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})
        paces[core] = pace_s(CALLS)
    best = min(paces, key=paces.__getitem__)
    os.sched_setaffinity(0, {best})
    return paces[best]


def measure_apart(name: str, *, operators: bool, quiet: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure within a process of its own; the time of one that failed is infinite."""
    answers, theirs = FORKS.Pipe(duplex=False)

    def work() -> None:
        if quiet:
            go_to_quietest_core()
        try:
            row, found = measure(TRAININGS[name], operators)
        except Exception as problem:
            row, found = {"step_s": math.inf, "failed": f"{type(problem).__name__}: {str(problem)[:300]}"}, []
        theirs.send((row | {"card": torch.cuda.get_device_name()}, found))

    process = FORKS.Process(target=work)
    process.start()
    theirs.close()
    try:
        return cast(tuple[dict[str, Any], list[dict[str, Any]]], answers.recv())
    except EOFError:
        return {"step_s": math.inf, "failed": "the process died"}, []
    finally:
        process.join()


def compile_once(name: str) -> None:
    """Leave what the compiler makes in its cache."""
    step = prepare(TRAININGS[name])
    for _ in range(2):
        step()
    torch.cuda.synchronize()


def compile_side_by_side(names: list[str]) -> None:
    for first in range(0, len(names), TOGETHER):
        compilers = [FORKS.Process(target=compile_once, args=(name,)) for name in names[first : first + TOGETHER]]
        for compiler in compilers:
            compiler.start()
        for compiler in compilers:
            compiler.join()


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
    parser.add_argument("--judged", action=argparse.BooleanOptionalAction, help="only those that are (not) judged by")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--operators", type=Path, help="where to keep each step's operators (.jsonl.gz)")
    parser.add_argument("--times", type=int, default=1, help="processes that measure each training")
    parser.add_argument("--quiet", action="store_true", help="one more process on the quietest core")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds after which nothing new is begun")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    for module in ("transformers", "timm", "peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)  # once for all processes; the card is not touched before they fork
    found: dict[str, Any] = {"torch": torch.__version__, "trainings": {}}
    names = arguments.names or [
        name for name in TRAININGS if arguments.judged is None or (name in JUDGED) == arguments.judged
    ]
    compile_side_by_side([name for name in names if TRAININGS[name].compiled])
    print(f"{time.perf_counter() - began_s:6.1f} compiled", flush=True)
    for name in names:
        if time.perf_counter() - began_s > arguments.limit:
            break
        runs = [measure_apart(name, operators=bool(arguments.operators)) for _ in range(arguments.times)]
        row, operators = min(
            runs, key=lambda run: abs(run[0]["step_s"] - statistics.median(r["step_s"] for r, _ in runs))
        )
        found["card"] = row.pop("card", None)
        row["runs_s"] = [run["step_s"] for run, _ in runs]
        if arguments.quiet:
            alone, _ = measure_apart(name, operators=False, quiet=True)
            row |= {"quiet_s": alone["step_s"], "quiet_pace_s": alone.get("pace_s")}
        found["trainings"][name] = row | {"judged": name in JUDGED}
        # What is judged by is not shown.
        print(
            f"{time.perf_counter() - began_s:6.1f} {name} {'' if name in JUDGED and 'failed' not in row else row}",
            flush=True,
        )
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        if arguments.operators:
            with gzip.open(arguments.operators, "at") as file:
                file.writelines(json.dumps({"training": name} | operator) + "\n" for operator in operators)


if __name__ == "__main__":
    main()

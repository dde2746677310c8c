"""Time what the host of a real GPU takes for a step: `python tools/probe_host.py --out FILE [NAME …]`.

The trainings of benchmarks/steps run with inputs so small that the card is never what is waited for. A core that is shared with
somebody else takes up to 1.7 times as long for the same calls, so each runs on the quietest core, again if that did not stay
quiet. Kept are the seconds of each phase and, by a profiler that knows the host alone, those of each operator itself.
"""

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "steps"))
from measure import CALLS, FORKS, go_to_quietest_core, pace_s, time_apart
from trainings import KNOWN, SEEN, Training, prepare

SMALL = {"batch": 2, "length": 128, "side": 64, "nodes": 1000, "edges": 5000}
LEAST_S = 0.3
QUIET = 1.35  # times the quietest pace that was seen


def smaller(training: Training) -> Training:
    """The same calls with less for the card to do. Pictures keep their size: a model may have positions for no other."""
    settings = {name: min(value, SMALL[name]) if name in SMALL else value for name, value in training.settings.items()}
    return replace(training, settings=settings)


def profile(step: Any) -> list[list[Any]]:
    """Each operator on each thread: how often, and its own microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    counts, spent = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    main = None
    for event in profiler.events():
        main = event.thread if main is None else main
        key = event.name, event.thread == main
        counts[key] += 1
        spent[key] += event.self_cpu_time_total
    return [[name, is_main, counts[name, is_main], round(spent[name, is_main], 1)] for name, is_main in counts]


def answer(training: Training, answers: Any) -> None:
    pace = go_to_quietest_core()
    step = prepare(training)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    row = {"host_s": time_apart(step, LEAST_S)[1], "pace_s": [pace, pace_s(CALLS)]}
    answers.send(row | {"operators": profile(step)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which nothing new is begun")
    arguments = parser.parse_args()
    for module in ("transformers", "timm", "peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    began_s = time.perf_counter()
    found: dict[str, Any] = {"torch": torch.__version__, "trainings": {}}
    best_s = float("inf")
    for name in arguments.names or [name for name, training in (KNOWN | SEEN).items() if not training.compiled]:
        for _ in range(3):
            if time.perf_counter() - began_s > arguments.limit:
                break
            answers, theirs = FORKS.Pipe(duplex=False)
            process = FORKS.Process(target=answer, args=(smaller((KNOWN | SEEN)[name]), theirs))
            process.start()
            theirs.close()
            try:
                row = answers.recv()
            except EOFError:
                print(f"{name} failed", flush=True)
                break
            finally:
                process.join()
            best_s = min(best_s, *row["pace_s"])
            before = found["trainings"].get(name)
            if before is None or max(row["pace_s"]) < max(before["pace_s"]):
                found["trainings"][name] = row
            if max(row["pace_s"]) < QUIET * best_s:
                break
        print(
            f"{time.perf_counter() - began_s:6.1f} {name} {found['trainings'].get(name, {}).get('pace_s')}", flush=True
        )
        arguments.out.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""Where the host's time of a decoding step goes, part by part, on a device: `python benchmarks/serve_steps.py --shape 0.6b`.

The standard workload, one step ahead, as in `tonnage serve`; looked at are the steps that decode at least nine tenths of its
256 sequences and nothing else. Each part's own time is the median over them, without the parts inside it: once of the steps
in which nobody ends, once of those in which somebody does. The clock's own time is told apart. Beside it: what the captured
graph is made of, and how long a launch of it takes while the device idles. Writes benchmarks/results/serve-steps-SHAPE.json.
`--tiny --device cpu` tries it out anywhere.
"""

import argparse
import ctypes
import json
import resource
import statistics
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

import serve
from tonnage.garbage import no_collection
from tonnage.serve.engine import Engine
from tonnage.serve.model_runner.inputs import Inputs, Staging
from tonnage.serve.model_runner.runner import DecodeGraphs, Runner, TokensInTransit
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.scheduler import Scheduler

# Methods by name, each inside those before it or beside them.
PARTS: list[tuple[str, type, str]] = [
    ("the turn itself", Engine, "advance"),
    ("schedule", Scheduler, "schedule"),
    ("launch", Runner, "launch"),
    ("launch, on its stream", Runner, "_launch"),
    ("rows of the step", Inputs, "take"),
    ("rows into the buffer", Inputs, "decodes"),
    ("the buffer's turn", Staging, "begin"),
    ("the buffer's copy", Staging, "_send"),
    ("the graph", DecodeGraphs, "replay"),
    ("tokens back", Runner, "_send"),
    ("tokens read", TokensInTransit, "result"),
    ("complete", Scheduler, "complete"),
]
WAITING = "waiting for the device"
# cudaGraphNodeType
KINDS = {0: "kernel", 1: "copy", 2: "memset", 3: "host call", 4: "graph", 5: "empty", 6: "wait", 7: "record"}


class Clock:
    """Seconds of each part in each turn, without those of the parts inside it."""

    def __init__(self) -> None:
        self.turns: list[Counter[str]] = []
        self.calls = 0
        self._inner_s = [0.0]

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*words: Any) -> Any:
            if name == PARTS[0][0]:
                self.turns.append(Counter())
            self.calls += 1
            began_s = time.perf_counter()
            self._inner_s.append(0.0)
            try:
                return method(*words)
            finally:
                took_s = time.perf_counter() - began_s
                own_s = took_s - self._inner_s.pop()
                self._inner_s[-1] += took_s
                self.turns[-1][name] += own_s

        return call


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """All parts are timed; the wait for the device is over before its tokens are read."""
    result = TokensInTransit.result

    def arrived(pending: TokensInTransit) -> Any:
        return clock.timed("tokens read", result)(pending)

    def waiting(pending: TokensInTransit) -> Any:
        if pending.arrived is not None:
            clock.timed(WAITING, pending.arrived.synchronize)()
        return arrived(pending)

    with ExitStack() as stack:
        for name, owner, method in PARTS:
            timed = waiting if owner is TokensInTransit else clock.timed(name, getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, timed))
        yield


@dataclass(slots=True)
class Found:
    """Median seconds by part, of steps of one kind, and the mean of their sum."""

    steps: int
    parts_s: dict[str, float]
    whole_s: float
    mean_s: float


def measure(engine: Engine, work: serve.Workload) -> tuple[Found, Found, float]:
    """Of full steps in which nobody ends, and in which somebody does; and the clock's own seconds in a step."""
    clock, kinds, faults = Clock(), [], page_faults()
    for prompt, wanted in zip(work.prompts, work.outputs, strict=True):
        sampling = Sampling(max_tokens=wanted, temperature=serve.TEMPERATURE, ignore_eos=True, seed=0)
        engine.submit(prompt, sampling, salt="measured")
    most = min(len(work.prompts), engine.config.max_seqs)
    with watched(clock), no_collection(), engine.at_work():
        while engine.has_work:
            output = engine.advance()
            step = engine._in_flight.step if engine._in_flight else None
            full = step is not None and not step.chunks and len(step.decodes) >= 0.9 * most
            kinds.append((full, bool(output.finished)))
    pairs = list(zip(clock.turns, kinds, strict=True))
    calm, ending = ([turn for turn, kind in pairs if kind == (True, ends)] for ends in (False, True))
    serve.say(f"{(page_faults() - faults) / len(pairs):.1f} page faults a step")
    clock_s = clock.calls / len(pairs) * call_s()
    return found_of(calm), found_of(ending), clock_s


def page_faults() -> int:
    """Of this process so far: memory touched for the first time, which a virtual machine may have to ask for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def found_of(turns: list[Counter[str]]) -> Found:
    """Medians; zeros where there were no such steps."""
    names = [name for name, _, _ in PARTS]
    wholes = [sum(turn[name] for name in names) for turn in turns] or [0.0]
    parts = {name: statistics.median([turn[name] for turn in turns] or [0.0]) for name in (*names, WAITING)}
    return Found(len(turns), parts, statistics.median(wholes), statistics.mean(wholes))


def call_s() -> float:
    """What timing one call takes."""
    clock = Clock()
    clock.turns.append(Counter())
    nothing, timed = (lambda: None), clock.timed("nothing", lambda: None)
    took = [min(timeit.repeat(call, number=10_000, repeat=5)) / 10_000 for call in (timed, nothing)]
    return took[0] - took[1]


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Graphs are kept after capture, so that their nodes can be counted."""
    made = torch.cuda.CUDAGraph
    with mock.patch.object(torch.cuda, "CUDAGraph", lambda: made(keep_graph=True)):
        yield


def nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """How many nodes of each kind a captured graph has."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    found = (ctypes.c_void_p * count.value)()
    assert runtime.cudaGraphGetNodes(raw, found, ctypes.byref(count)) == 0
    kinds: Counter[str] = Counter()
    for node in found:
        kind = ctypes.c_int()
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds[KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return dict(kinds)


def idle_launch_s(engine: Engine, graphs: DecodeGraphs, size: int) -> float:
    """Of a graph, all of it padding, on a device that has nothing else to do."""
    found = []
    engine.runner.inputs.forget()
    engine.runner.inputs.decodes(size)
    for _ in range(20):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        graphs.replay(size)
        found.append(time.perf_counter() - began_s)
    torch.cuda.synchronize()
    return statistics.median(found)


def main(given: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=serve.PRESETS, default="0.6b", help="of Qwen3 (default: 0.6b)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few seconds")
    parser.add_argument("--out", type=Path, default=serve.RESULTS, help="the folder for the figures")
    options = parser.parse_args(given)
    on_cuda = torch.device(options.device).type == "cuda"
    with kept_graphs() if on_cuda else ExitStack():
        engine = serve.make_engine(options)
    calm, ending, clock_s = measure(engine, serve.workload(tiny=options.tiny))
    rows = [[name, f"{1e6 * calm.parts_s[name]:.1f}", f"{1e6 * ending.parts_s[name]:.1f}"] for name in calm.parts_s]
    serve.table(["own time, µs", "nobody ends", "somebody ends"], rows)
    wholes = f"{1e6 * calm.whole_s:.0f} µs ({calm.steps} steps), {1e6 * ending.whole_s:.0f} µs ({ending.steps})"
    serve.say(f"the host's part of a full step: {wholes}; of it this clock {1e6 * clock_s:.0f} µs")
    sequences = engine.config.max_seqs
    result: dict[str, Any] = {"calm": asdict(calm), "ending": asdict(ending), "clock_s": clock_s}
    graphs = engine.runner._graphs
    if graphs is not None:
        result["nodes"] = nodes(graphs._graphs[sequences])
        with engine.at_work():
            result["idle_launch_s"] = idle_launch_s(engine, graphs, sequences)
        serve.say(f"the graph: {result['nodes']}; launched in {1e6 * result['idle_launch_s']:.0f} µs on an idle device")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"serve-steps-{'tiny' if options.tiny else options.shape}.json"
    path.write_text(json.dumps(result | serve.facts(), indent=1) + "\n", "utf-8")
    serve.say(f"wrote {path}")


if __name__ == "__main__":
    main()

"""Where the host's time of a decoding step goes, part by part, on a device: `python benchmarks/serve_steps.py --shape 0.6b`.

256 sequences decode, one step ahead, as in `tonnage serve`. Each part's own time is the median over steps, without the parts
inside it. Beside it: what the captured graph is made of, and how long a launch of it takes while the device idles. Writes
benchmarks/results/serve-steps-SHAPE.json. `--tiny --device cpu` tries it out anywhere.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

import serve
from tonnage.serve.engine import Engine
from tonnage.serve.graphs import DecodeGraphs
from tonnage.serve.inputs import Inputs, Staging
from tonnage.serve.runner import Pending, Runner
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler import Scheduler

# Methods by name, each inside those before it or beside them.
PARTS: list[tuple[str, type, str]] = [
    ("the turn itself", Engine, "turn"),
    ("schedule", Scheduler, "schedule"),
    ("launch", Runner, "launch"),
    ("launch, on its stream", Runner, "_launch"),
    ("rows of the step", Inputs, "take"),
    ("rows into the buffer", Inputs, "decodes"),
    ("the buffer's turn", Staging, "begin"),
    ("the buffer's copy", Staging, "send"),
    ("the graph", DecodeGraphs, "replay"),
    ("tokens back", Runner, "_send"),
    ("tokens read", Pending, "result"),
    ("complete", Scheduler, "complete"),
]
# cudaGraphNodeType
KINDS = {0: "kernel", 1: "copy", 2: "memset", 3: "host call", 4: "graph", 5: "empty", 6: "wait", 7: "record"}


class Clock:
    """Seconds of each part in each turn, without those of the parts inside it."""

    def __init__(self) -> None:
        self.turns: list[Counter[str]] = []
        self._inner_s = [0.0]

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*words: Any) -> Any:
            if name == PARTS[0][0]:
                self.turns.append(Counter())
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
    result = Pending.result

    def arrived(pending: Pending) -> Any:
        return clock.timed("tokens read", result)(pending)

    def waiting(pending: Pending) -> Any:
        if pending.arrived is not None:
            clock.timed("waiting for the device", pending.arrived.synchronize)()
        return arrived(pending)

    with ExitStack() as stack:
        for name, owner, method in PARTS:
            timed = waiting if owner is Pending else clock.timed(name, getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, timed))
        yield


def measure(engine: Engine, sequences: int, steps: int, words: int) -> dict[str, float]:
    """The median seconds of each part, while so many sequences decode."""
    sampling = Sampling(max_tokens=steps + 40, temperature=serve.TEMPERATURE, ignore_eos=True, seed=0)
    started = [engine.submit([number % words] * (16 + number % 16), sampling)[0] for number in range(sequences)]
    while any(one.drawn < 8 for one in started):
        engine.turn()
    clock = Clock()
    with watched(clock):
        for _ in range(steps):
            engine.turn()
    for one in started:
        engine.abort(one)
    while engine.has_work:
        engine.turn()
    names = [name for name, _, _ in PARTS] + ["waiting for the device"]
    return {name: statistics.median(turn[name] for turn in clock.turns) for name in names}


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


def idle_launch_s(graphs: DecodeGraphs, size: int) -> float:
    """Of a graph on a device that has nothing else to do."""
    found = []
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few seconds")
    parser.add_argument("--out", type=Path, default=serve.RESULTS, help="the folder for the figures")
    options = parser.parse_args(given)
    on_cuda = torch.device(options.device).type == "cuda"
    with kept_graphs() if on_cuda else ExitStack():
        engine = serve.make_engine(options)
    sequences = engine.settings.max_seqs
    found = measure(engine, sequences, options.steps, engine.architecture.vocab)
    host_s = sum(seconds for name, seconds in found.items() if name != "waiting for the device")
    serve.table(["own time", "µs"], [[name, f"{1e6 * seconds:.1f}"] for name, seconds in found.items()])
    serve.say(f"the host's part of a step with {sequences} sequences: {1e6 * host_s:.0f} µs")
    result: dict[str, Any] = {"sequences": sequences, "host_s": host_s, "parts_s": found}
    graphs = engine.runner._graphs
    if graphs is not None:
        result["nodes"] = nodes(graphs._graphs[sequences])
        result["idle_launch_s"] = idle_launch_s(graphs, sequences)
        serve.say(f"the graph: {result['nodes']}; launched in {1e6 * result['idle_launch_s']:.0f} µs on an idle device")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"serve-steps-{'tiny' if options.tiny else options.shape}.json"
    path.write_text(json.dumps(result | serve.facts(), indent=1) + "\n", "utf-8")
    serve.say(f"wrote {path}")


if __name__ == "__main__":
    main()

"""Find on a real GPU what every operator allocates inside: the ordered allocator events of each call.

    python tools/probe_operators.py --out DIR [--jobs 8] [--groups matrix,attention]
    python tools/probe_operators.py --dry-run [--groups matrix]      # no GPU: are the cases well formed?

Each group of cases (one module of `probe_cases`) runs as a process of its own, so that a CUDA error ends
one process and not the probe: the group goes on in a new process after the case that broke it.
It writes DIR/operators.jsonl.gz and DIR/process.json; tools/README.md explains their rows. It does not know
what the events mean: that is for whoever writes an operator's model.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import gzip
import importlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).parent))
from probe_cases.spec import Case

# Each group and the processes that share its cases, the slowest first.
GROUPS = {
    "convolutions_benchmark": 4, "convolutions": 4, "attention": 4, "recurrent": 2, "optimizers": 2, "reductions": 2, "matrix": 1, "activations": 1, "indexing": 1,
    "linear_algebra": 1, "norms": 1, "losses": 1, "pooling": 1, "images": 1, "spectral": 1, "creation": 1, "composite": 1,
}  # fmt: skip
SECONDS_PER_WORKER = 150
BROKEN_CUDA = 3
ROWS_PER_TENSOR_LIST = 12
ELEMENTS_FOR_CPU = 200_000
HALF_ELEMENTS_FOR_CPU = 20_000
RESERVED_BYTES_PER_WORKER = 6 << 30


class Recorder:
    """The allocator's events of each `with` block; ids number allocations over the life of the recorder."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.count = 0
        self.events: list[list[Any]] = []

    def __enter__(self) -> Recorder:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=200_000)
        return self

    def __exit__(self, *exception: object) -> None:
        self.events = []
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
            self.events = [row for e in trace if (row := self._row(e))]

    def _row(self, event: dict[str, Any]) -> list[Any] | None:
        address, size = event.get("addr", 0), event["size"]
        if event["action"] == "alloc":
            self.ids[address] = self.count
            self.count += 1
            stream = event.get("stream", 0)
            return ["alloc", size, self.ids[address]] + ([stream] if stream else [])
        if event["action"] == "free_completed":
            return ["free", size, self.ids.pop(address, -1)]
        return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, (list, tuple)):
        return [x for v in value for x in tensors_in(v)]
    if isinstance(value, dict):
        return [x for v in value.values() for x in tensors_in(v)]
    return []


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        row = {"shape": list(value.shape), "dtype": str(value.dtype)[6:], "grad": value.requires_grad}
        if value.layout != torch.strided:
            return {**row, "layout": str(value.layout)}
        if not value.is_contiguous():
            row["stride"] = list(value.stride())
        return row if value.is_cuda else {**row, "device": str(value.device)}
    if isinstance(value, (list, tuple)):
        return [described(v) for v in value[:ROWS_PER_TENSOR_LIST]] + (
            [f"of {len(value)}"] if len(value) > ROWS_PER_TENSOR_LIST else []
        )
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return " ".join(repr(value).split())[:400]


def described_output(value: torch.Tensor) -> list[Any]:
    if value.layout != torch.strided:
        return [list(value.shape), str(value.dtype)[6:], str(value.layout), None]
    return [list(value.shape), str(value.dtype)[6:], list(value.stride()), value.untyped_storage().nbytes()]


def rows_of(case: Case, device: str) -> list[dict[str, Any]]:
    """The forward row and, where something differentiable came out, the backward row."""
    base = {
        "op": case.op,
        "case": case.note,
        "args": None,
        "outputs": [],
        "events": [],
        "first_call_events": [],
        "error": None,
    }
    forward, backward = dict(base), {**base, "op": f"{case.op} backward"}
    try:
        args, kwargs = case.make(device)
        forward["args"] = described(args) + ([{k: described(v) for k, v in kwargs.items()}] if kwargs else [])
        with case.around():
            for key in ("first_call_events", "events"):
                _measure(case, args, kwargs, forward, backward, key)
    except Exception as error:
        (backward if forward["outputs"] else forward)["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    has_backward = backward["outputs"] or backward["error"]
    return [forward, backward] if has_backward else [forward]


def _measure(
    case: Case, args: list[Any], kwargs: dict[str, Any], forward: dict[str, Any], backward: dict[str, Any], key: str
) -> None:
    recorder = Recorder()
    with recorder:
        result = case.call(*args, **kwargs)
    forward[key] = recorder.events
    outputs = tensors_in(result)
    forward["outputs"] = [described_output(o) for o in outputs]
    differentiable = [o for o in outputs if o.grad_fn is not None]
    leaves = [x for x in tensors_in([args, kwargs]) if x.requires_grad and x.is_leaf]
    if not (case.backward and differentiable and leaves):
        return
    gradients = [torch.ones_like(o, memory_format=torch.preserve_format) for o in differentiable]
    del result, outputs
    with recorder:
        results = torch.autograd.grad(differentiable, leaves, gradients, allow_unused=True)
    backward[key] = recorder.events
    backward["args"] = [described(g) for g in gradients]
    backward["outputs"] = [None if g is None else described_output(g) for g in results]


def cases_of(group: str) -> list[Case]:
    return list(importlib.import_module(f"probe_cases.{group}").cases())


def _pretence(case: Case, device: str) -> contextlib.AbstractContextManager[Any]:
    """On the CPU large cases run on fake tensors: their shapes are checked and nothing is computed."""
    if device == "cuda" or case.elements() <= (HALF_ELEMENTS_FOR_CPU if case.is_half() else ELEMENTS_FOR_CPU):
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _cuda_works() -> bool:
    try:
        torch.zeros(1, device="cuda").add_(1).cpu()
    except RuntimeError:
        return False
    return True


def _tidy(index: int, device: str) -> None:
    """Cycles are collected between the cases, never within a recording."""
    crowded = device == "cuda" and torch.cuda.memory_reserved() > RESERVED_BYTES_PER_WORKER
    if crowded or index % 50 == 0:
        gc.collect()
    if crowded:
        torch.cuda.empty_cache()


def work(group: str, share: tuple[int, int], start: int, out: TextIO, device: str) -> int:
    """Run every `share[1]`-th case of the group from `share[0]` on, leaving out those before `start`."""
    torch.manual_seed(0)
    gc.disable()
    for index, case in enumerate(cases_of(group)):
        if index < start or index % share[1] != share[0]:
            continue
        begun = time.perf_counter()
        with _pretence(case, device):
            rows = rows_of(case, device)
        for row in rows:
            error = row["error"] or ""
            out.write(json.dumps({"group": group, "index": index, **row}) + "\n")
            if error and device == "cuda" and not _cuda_works():
                out.flush()
                return BROKEN_CUDA
        out.flush()
        _tidy(index, device)
        if device == "cpu" and (seconds := time.perf_counter() - begun) > 2:
            print(f"slow on the CPU: {group} {index} {case.op} {case.note} {seconds:.1f} s", file=sys.stderr)
    return 0


def whole_rows(part: Path) -> list[dict[str, Any]]:
    """The rows of a part file, less a last line that its writer did not finish."""
    *lines, _unfinished = part.read_text().split("\n")
    return [json.loads(line) for line in lines]


class Worker:
    """One share of a group in its own process; started again after the case that broke it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.part = name, folder / f"part-{name}.jsonl"
        self.deadline = time.time() + SECONDS_PER_WORKER
        self.begun = time.time()
        self.part.write_text("")
        self._start(0)

    def _start(self, start: int) -> None:
        command = [sys.executable, __file__, "--worker", self.name, "--start", str(start), "--part", str(self.part)]
        self.started_at = start
        self.process = subprocess.Popen(command)

    def done(self) -> bool:
        code = self.process.poll()
        if code is None and time.time() > self.deadline:
            self.process.kill()
            return self._say("stopped: out of time")
        if code is None:
            return False
        if code == 0:
            return self._say("done")
        rows = whole_rows(self.part)
        if not rows:
            return self._say(f"failed to start (exit {code})")
        shares = int(self.name.split("-")[2])
        last_tried = max(rows[-1]["index"] + (0 if code == BROKEN_CUDA else shares), self.started_at)
        self._say(f"exit {code} at case {last_tried}; going on after it")
        self._start(last_tried + 1)
        return False

    def _say(self, words: str) -> bool:
        print(f"{time.time() - self.begun:6.1f} s  {self.name}: {words}, {len(whole_rows(self.part))} rows", flush=True)
        return True


class ProcessWorker:
    """One chain of operations in a fresh process, for the bytes that lie outside the caching allocator."""

    def __init__(self, chain: str, folder: Path) -> None:
        self.part = folder / f"process-{chain}.json"
        self.deadline = time.time() + 90
        self.process = subprocess.Popen([sys.executable, __file__, "--process", chain, "--part", str(self.part)])

    def done(self) -> bool:
        if self.process.poll() is None and time.time() > self.deadline:
            self.process.kill()
        return self.process.poll() is not None


def header() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name, "total_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "driver": pynvml.nvmlSystemGetDriverVersion(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def probe(folder: Path, groups: list[str], jobs: int, with_process: bool) -> None:
    from probe_cases.process import CHAINS

    folder.mkdir(parents=True, exist_ok=True)
    waiting: list[tuple[type[Any], str]] = [(Worker, f"{g}-{k}-{GROUPS[g]}") for g in groups for k in range(GROUPS[g])]
    waiting += [(ProcessWorker, c) for c in CHAINS] if with_process else []
    running: list[Any] = []
    parts: list[Any] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            kind, name = waiting.pop(0)
            running.append(kind(name, folder))
            parts.append(running[-1])
        running = [w for w in running if not w.done()]
        time.sleep(0.1)
    _merge(
        folder,
        [w.part for w in parts if isinstance(w, Worker)],
        [w.part for w in parts if isinstance(w, ProcessWorker)],
    )


def _merge(folder: Path, parts: list[Path], process_parts: list[Path]) -> None:
    first = header()
    with gzip.open(folder / "operators.jsonl.gz", "wt") as out:
        out.write(json.dumps(first) + "\n")
        for part in parts:
            out.writelines(json.dumps(row) + "\n" for row in whole_rows(part))
            part.unlink()
    rows = [json.loads(p.read_text()) for p in process_parts if p.exists()]
    (folder / "process.json").write_text(json.dumps({"header": first, "rows": rows}, indent=1))
    for part in process_parts:
        part.unlink(missing_ok=True)


def dry_run(groups: list[str]) -> int:
    """Run every case on the CPU and list what failed; what only a GPU can do fails too and is listed."""
    import io

    failures = 0
    torch.set_num_threads(1)  # torch 2.13's bf16 kernels die of an illegal instruction on some Arm CPUs with more
    for group in groups:
        out = io.StringIO()
        begun = time.time()
        work(group, (0, 1), 0, out, "cpu")
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        failed = [r for r in rows if r["error"]]
        failures += len(failed)
        print(f"{group}: {len(rows)} rows, {len(failed)} failed, {time.time() - begun:.1f} s", flush=True)
        for r in failed:
            print(f"    {r['index']} {r['op']} [{r['case']}]: {r['error'][:160]}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for operators.jsonl.gz and process.json")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time on the one GPU")
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated groups of cases")
    parser.add_argument("--no-process", action="store_true", help="leave out the memory outside the caching allocator")
    parser.add_argument(
        "--dry-run", action="store_true", help="run the cases on the CPU, unmeasured, and list failures"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker:
        with options.part.open("a") as out:
            group, share, shares = options.worker.split("-")
            return work(group, (int(share), int(shares)), options.start, out, "cuda")
    if options.process:
        from probe_cases.process import measure_chain

        options.part.write_text(json.dumps(measure_chain(options.process, Recorder())))
        return 0
    groups = options.groups.split(",")
    if options.dry_run:
        dry_run(groups)
        return 0
    if options.out is None or not torch.cuda.is_available():
        parser.error("a GPU and --out DIR are needed (or --dry-run on a machine without one)")
    probe(options.out, groups, options.jobs, not options.no_process)
    return 0


if __name__ == "__main__":
    sys.exit(main())

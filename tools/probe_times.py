"""Time every kind of kernel on a real GPU over a grid of shapes: what the clock is made from and judged by.

    python tools/probe_times.py --out FILE.jsonl.gz [--kinds matmul,attention] [--limit SECONDS]
    python tools/probe_times.py --dry-run                # no GPU: are the cases well formed?

Each case of `time_cases` is a row for its forward pass and one for its backward: the card's own seconds, with launches waiting
in its queue, and the host's seconds to launch them. Cases of all kinds come in turns, so that a limit leaves out some of each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import time_cases
from probe_cases.spec import Case
from probe_operators import described, tensors_in

CYCLES_PER_S = 1.9e9
LEAST_S = 2.5e-3  # of the card's time in one measurement
MOST_CALLS = 60  # in the card's queue
SUSTAINED_S = 3.0
RESERVED_BYTES = 60 << 30


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the card and of the host for one call, the better of two bursts that wait in the card's queue."""
    call()
    torch.cuda.synchronize()
    once_s, host_s = _burst(call, 1, 0.0)
    calls = max(1, min(MOST_CALLS, round(LEAST_S / max(once_s, 1e-6))))
    bursts = [_burst(call, calls, 1.5 * calls * host_s + 1e-4) for _ in range(2)]
    return min(burst[0] for burst in bursts), min(burst[1] for burst in bursts)


def _burst(call: Callable[[], object], calls: int, behind_s: float) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if behind_s:
        torch.cuda._sleep(int(behind_s * CYCLES_PER_S))
    start.record()
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    host_s = (time.perf_counter() - began_s) / calls
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls, host_s


def rows_of(kind: str, case: Case) -> Iterator[dict[str, Any]]:
    """The forward row and, where something differentiable comes out, the backward row."""
    args, kwargs = case.make("cuda")
    base = {"kind": kind, "op": case.op, "note": case.note}
    base["args"] = described(args) + ([{k: described(v) for k, v in kwargs.items()}] if kwargs else [])
    with case.around():
        gpu_s, host_s = timed(lambda: case.call(*args, **kwargs))
        yield base | {"gpu_s": gpu_s, "host_s": host_s}
        if not case.backward or not torch.is_grad_enabled():
            return
        outputs = [output for output in tensors_in(case.call(*args, **kwargs)) if output.grad_fn is not None]
        leaves = [leaf for leaf in tensors_in([args, kwargs]) if leaf.requires_grad and leaf.is_leaf]
        if not outputs or not leaves:
            return
        gradients = [torch.ones_like(output) for output in outputs]
        backward = lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)  # noqa: E731
        gpu_s, host_s = timed(backward)
        yield base | {"op": f"{case.op} backward", "gpu_s": gpu_s, "host_s": host_s}


def in_turns(kinds: set[str]) -> Iterator[tuple[str, Case]]:
    """One case of each kind after the other, those with more cases more often."""
    by_kind: dict[str, list[Case]] = {}
    for kind, case in time_cases.cases():
        if not kinds or kind in kinds:
            by_kind.setdefault(kind, []).append(case)
    places = [(place / len(found), kind, case) for kind, found in by_kind.items() for place, case in enumerate(found)]
    yield from ((kind, case) for _, kind, case in sorted(places, key=lambda row: row[:2]))


def sustained() -> Iterator[dict[str, Any]]:
    """How fast a card stays under load: a large product for seconds, in pieces of a twentieth."""
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    piece_s, began_s, found = 0.05, time.perf_counter(), []
    calls = max(1, round(piece_s / _burst(lambda: one @ one, 4, 0.0)[0]))
    while time.perf_counter() - began_s < SUSTAINED_S:
        found.append(_burst(lambda: one @ one, calls, 0.0)[0])
    yield {"kind": "sustained", "op": "mm", "args": [described(one)] * 2, "each_s": found}


def launches() -> Iterator[dict[str, Any]]:
    """What the host takes for small calls, which the card does at once."""
    x, w = (torch.ones(16, 16, device="cuda", requires_grad=True) for _ in range(2))
    layer, norm = torch.nn.Linear(16, 16, device="cuda"), torch.nn.LayerNorm(16, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + w, "mm": lambda: x @ w, "linear": lambda: layer(x), "layer_norm": lambda: norm(x),
        "view": lambda: x.view(4, 64), "softmax": lambda: x.softmax(-1), "to": lambda: x.to(torch.bfloat16),
        "item": lambda: x.sum().item(), "chain of ten": lambda: _chain(x),
    }  # fmt: skip
    for name, call in calls.items():
        yield {"kind": "launch", "op": name, "host_s": _host_s(call)}
        with torch.no_grad():
            yield {"kind": "launch", "op": f"{name} without gradients", "host_s": _host_s(call)}
    with torch.autocast("cuda", torch.bfloat16):
        yield {"kind": "launch", "op": "linear under autocast", "host_s": _host_s(lambda: layer(x))}
    whole = _host_s(lambda: _chain(x).sum().backward())
    yield {"kind": "launch", "op": "chain of ten, sum and backward", "host_s": whole}


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = x * 1.01
    return x


def _host_s(call: Callable[[], Any], calls: int = 400) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    taken_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    return taken_s / calls


def facts() -> dict[str, Any]:
    asked = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    said = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": said.strip(),
    }


def probe(out: Path, kinds: set[str], limit_s: float) -> None:
    began_s, count, failed = time.perf_counter(), 0, 0
    torch.backends.cudnn.allow_tf32 = False
    with gzip.open(out, "wt") as file:
        for row in itertools.chain([facts()], launches(), sustained()):
            file.write(json.dumps(row) + "\n")
        gc.disable()
        for number, (kind, case) in enumerate(in_turns(kinds)):
            if time.perf_counter() - began_s > limit_s:
                break
            try:
                for row in rows_of(kind, case):
                    file.write(json.dumps(row) + "\n")
                    count += 1
            except (RuntimeError, ValueError, TypeError) as error:
                failed += 1
                file.write(
                    json.dumps({"kind": kind, "op": case.op, "note": case.note, "error": str(error)[:200]}) + "\n"
                )
            if number % 50 == 0:
                gc.collect()
                print(f"{time.perf_counter() - began_s:6.1f} s  {count} rows, {failed} failed", flush=True)
            if torch.cuda.memory_reserved() > RESERVED_BYTES:
                gc.collect()
                torch.cuda.empty_cache()
    print(f"{count} rows, {failed} failed, {time.perf_counter() - began_s:.0f} s")


def dry_run(kinds: set[str]) -> int:
    """Every case on fake tensors; how many fail."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    failed, counts = 0, dict[str, int]()
    for kind, case in in_turns(kinds):
        counts[kind] = counts.get(kind, 0) + 1
        pinned = any(getattr(spec, "fill", "") == "pinned" for spec in case.args)
        try:
            with contextlib.nullcontext() if pinned else FakeTensorMode(allow_non_fake_inputs=True):
                args, kwargs = case.make("cpu") if not pinned else ([], {})
                if args and kind != "matmul8":
                    case.call(*args, **kwargs)
        except Exception as error:
            failed += 1
            print(f"{kind} {case.op} {case.note}: {type(error).__name__}: {str(error)[:200]}")
    print(", ".join(f"{kind} {count}" for kind, count in counts.items()), f"; {failed} failed")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", default="", help="some of: " + ", ".join(kind.__name__ for kind in time_cases.KINDS))
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which no case is begun")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    kinds = {kind for kind in options.kinds.split(",") if kind}
    if options.dry_run:
        return int(dry_run(kinds) > 0)
    probe(options.out, kinds, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())

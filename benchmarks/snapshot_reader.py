"""Time and memory of a PyTorch snapshot with a million events, from the file to the report.

    .venv/bin/python benchmarks/snapshot_reader.py [--events 1000000] [--depth 25]

The snapshot is generated: a training loop's blocks through the allocator's model, a stack of its own on each allocation
and each free, as PyTorch writes them. Each figure is of a process of its own, import and all.
"""

import argparse
import gzip
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tonnage.allocator import CachingAllocator

TONNAGE = str(Path(sys.executable).parent / "tonnage")
LIVE_BLOCKS = 2000
USAGE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


class Script:
    """Frames of a program that is `depth` calls deep; each frame is one object, each stack a list of its own."""

    def __init__(self, depth: int) -> None:
        module = "/usr/lib/python3/site-packages/torch/nn/modules/module.py"
        calls = [("_call_impl", module, 1790), ("_wrapped_call_impl", module, 1779)]
        shared = [*calls * (depth // 2), ("<module>", "/home/me/train.py", 88)]
        self._below = [{"name": name, "filename": file, "line": line} for name, file, line in shared]
        self._tops = [{"name": "forward", "filename": "/home/me/model.py", "line": line} for line in range(400)]

    def stack(self) -> list[dict[str, Any]]:
        return [random.choice(self._tops), *self._below]


def snapshot(events: int, depth: int) -> dict[str, Any]:
    """A snapshot with this many events."""
    trace: list[dict[str, Any]] = []
    script, living = Script(depth), []
    frames: list[dict[str, Any]] = []

    def write(action: str, address: int, size: int, stream: int = 0) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 10**15 + len(trace)}
        trace.append(entry | {"compile_context": "N/A", "user_metadata": "", "frames": frames})

    allocator = CachingAllocator(2**40, observer=write)
    while len(trace) < events:
        frames = script.stack()
        block = allocator.malloc(random.choice((300, 5000, 2**20, 3 * 2**20, 50 * 2**20, 65 * 2**20 + 700)))
        write("alloc", block.address, block.requested_bytes)
        living.append(block)
        if len(living) > LIVE_BLOCKS:
            frames = script.stack()
            gone = living.pop(random.randrange(len(living)))
            write("free_requested", gone.address, gone.requested_bytes)
            write("free_completed", gone.address, gone.requested_bytes)
            allocator.free(gone)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    return {
        "segments": allocator.snapshot(),
        "device_traces": [trace],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def timed(*words: str) -> str:
    """Seconds, seconds of the processor and GiB at most of a command."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", USAGE, *words], capture_output=True, check=True, text=True)
    busy, kib = map(float, done.stdout.split())
    return f"{time.perf_counter() - start:6.1f} s ({busy:.1f} s of the processor)  {kib / 2**20:.2f} GiB at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=25)
    wanted = parser.parse_args()
    random.seed(0)
    with TemporaryDirectory() as folder:
        plain, packed = Path(folder, "big.pickle"), Path(folder, "big.pickle.gz")
        data = pickle.dumps(snapshot(wanted.events, wanted.depth), protocol=4)
        plain.write_bytes(data)
        packed.write_bytes(gzip.compress(data, 1))
        read = "import sys, pathlib, tonnage.recording as r; r.open_recording(pathlib.Path(sys.argv[1]))"
        print(f"{wanted.events:,} events, {wanted.depth} frames deep: {len(data) / 1e6:.0f} MB")
        for name, words in (
            ("read", [sys.executable, "-c", read, str(plain)]),
            ("read, gzipped", [sys.executable, "-c", read, str(packed)]),
            ("tonnage show", [TONNAGE, "show", str(plain)]),
        ):
            print(f"  {name:<16}{timed(*words)}")


if __name__ == "__main__":
    main()

"""Time what people wait for: start-up, the allocator, a recording's file, the advice, and a virtual run of the example.

    .venv/bin/python benchmarks/run.py

Each figure is the best of a few tries, on this machine.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tonnage.allocator import CachingAllocator
from tonnage.explain import advise
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.recording import Allocation, Header, Mark, Recording, read_recording, write_recording
from tonnage.recording.replay import replay_on

ROOT = Path(__file__).parents[1]
TONNAGE = str(Path(sys.executable).parent / "tonnage")
BLOCKS = 200_000


def best_of(tries: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest try."""
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def call(*words: str) -> Callable[[], object]:
    """A command in a process of its own, import and all."""
    return lambda: subprocess.run([TONNAGE, *words], capture_output=True, check=True, cwd=ROOT)


def churn() -> None:
    """A queue of 500 blocks of mixed sizes through the allocator."""
    allocator, living = CachingAllocator(find_gpu("h200").memory_bytes), []
    for number in range(BLOCKS):
        living.append(allocator.malloc(512 * (1 + number * 7919 % 40_000)))
        if len(living) > 500:
            allocator.free(living.pop(0))


def long_recording() -> Recording:
    """As many blocks as a long training run has, 500 alive at a time."""
    card = find_gpu("h200")
    known = {"gpu": card.key, "gpu_name": card.name, "capacity_bytes": card.memory_bytes}
    header = Header(**known, torch_modelled="2.11", torch_installed="2.13")
    blocks = []
    for i in range(BLOCKS):
        size, born = 512 * (1 + i * 7919 % 4000), 2 * i
        where = (f"op{i % 40}", f"layers.{i % 80}.mlp", "forward", i // 20_000, f"train.py:{i % 90}", ())
        blocks.append(Allocation(i, 0, size, size, 0, born, born + 1001, Category.ACTIVATIONS, *where))
    return Recording(header, blocks, marks=[Mark(0, "phase", "forward")])


def main() -> None:
    recording = long_recording()
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "long.tonnage"
        rows = {
            "tonnage --version": best_of(5, call("--version")),
            "tonnage run --help": best_of(5, call("run", "--help")),
            f"allocator, {BLOCKS:,} blocks": best_of(3, churn),
            f"write a recording of {BLOCKS:,}": best_of(3, lambda: write_recording(path, recording, force=True)),
            f"read a recording of {BLOCKS:,}": best_of(3, lambda: read_recording(path)),
            f"advise on {BLOCKS:,}": best_of(1, lambda: advise(recording)),
            f"replay {BLOCKS:,} on another card": best_of(1, lambda: replay_on(recording, find_gpu("a100-80"))),
            "tonnage run, the example": best_of(2, call("run", "--gpu", "h200", "examples/train_gpt.py")),
        }
    for name, seconds in rows.items():
        print(f"{name:<42}{seconds:8.2f} s")


if __name__ == "__main__":
    main()

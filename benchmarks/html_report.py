"""Time, memory and size of the page of a recording with a million events.

    .venv/bin/python benchmarks/html_report.py [--events 1000000] [--keep FILE]

The recording is generated: blocks of every category that come and go, in steps and phases, each with a stack, a module
and a shape. The figures are of this process: what the page takes beyond the recording.
"""

import argparse
import random
import resource
import time
from pathlib import Path

from tonnage.ledger import Category
from tonnage.recording import Allocation, Header, Mark, Recording, SegmentEvent
from tonnage.report.html import render_page
from tonnage.report.html.series import STACKING
from tonnage.report.output import write_text

BASE = 1 << 44
RESERVED_BYTES = 120 << 30
LIVE_BLOCKS = 9000
EVENTS_A_STEP = 5000
EVENTS_A_PHASE = 1000
LARGEST_BLOCKS = 20_000


def recording(events: int) -> Recording:
    """A run with this many events."""
    header = Header(
        gpu="h200", gpu_name="NVIDIA H200", capacity_bytes=150_109_880_320, torch_modelled="", torch_installed=""
    )
    made = Recording(header, segments=[SegmentEvent(0, "segment_map", BASE, RESERVED_BYTES, 0)])
    stacks = [tuple(f"/home/me/project/model_{i}.py:{j} forward" for j in range(20)) for i in range(500)]
    living: list[Allocation] = []
    for event in range(1, events):
        _mark(made, event)
        if (len(living) < LIVE_BLOCKS and random.random() < 0.52) or not living:
            living.append(_block(len(made.allocations), event, stacks))
            made.allocations.append(living[-1])
        else:
            chosen = random.randrange(len(living))
            living[chosen], living[-1] = living[-1], living[chosen]
            living.pop().died = event
    return made


def _mark(made: Recording, event: int) -> None:
    if event % EVENTS_A_STEP == 1:
        made.marks.append(Mark(event, "step", str(event // EVENTS_A_STEP + 1)))
    if event % EVENTS_A_PHASE == 1:
        made.marks.append(Mark(event, "phase", random.choice(("forward", "backward", "optimizer"))))


def _block(number: int, event: int, stacks: list[tuple[str, ...]]) -> Allocation:
    size = random.randrange(1, LARGEST_BLOCKS) * 512
    return Allocation(
        index=number, address=BASE + number * 2**21 % RESERVED_BYTES, requested_bytes=size, block_bytes=size, stream=0,
        born=event, category=random.choice([c for c in STACKING if c is not Category.CONTEXT]), operator="aten::mm",
        module=f"layers.{number % 97}.mlp.{number % 7}", step=event // EVENTS_A_STEP + 1,
        line=f"train.py:{number % 900}", stack=stacks[number % len(stacks)], shape=(16, size), dtype="bfloat16",
    )  # fmt: skip


def used_mib() -> int:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Make it, render it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="write the page here")
    asked = parser.parse_args()
    random.seed(1)
    made = recording(asked.events)
    before = used_mib()
    start = time.perf_counter()
    page = render_page(made)
    seconds = time.perf_counter() - start
    print(f"  {asked.events:,} events   {seconds:.1f} s   {len(page.encode()) / 1e6:.1f} MB   ", end="")
    print(f"{used_mib() - before} MiB beyond the recording's {before}")
    if asked.keep:
        write_text(asked.keep, page)


if __name__ == "__main__":
    main()

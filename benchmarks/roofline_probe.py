"""Measure a card's own ceilings: what programs reach, for `tonnage roofline --ceilings FILE`.

    python benchmarks/roofline_probe.py [-o ceilings.json] [--device 0]

| figure                  | measured as                                                                     |
|-------------------------|---------------------------------------------------------------------------------|
| memory_bytes_per_s      | a copy on the card of 2 GiB (or a tenth of what is free), read and written      |
| rates                   | products of 8192 × 8192 matrices of random numbers, by precision                |
| host_link_bytes_per_s   | a copy of 256 MiB from pinned memory                                            |
| kernel_floor_s          | a kernel on one number, replayed a hundred times in a CUDA graph                |
| launch_s                | what the host takes to issue one such kernel                                    |

Medians of several runs after a warm-up, timed by CUDA events. Random numbers, not zeros: cards clock higher on zeros. Needs
torch with a CUDA card, and nothing of Tonnage; takes some seconds.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

FORMAT = 1
SIDE = 8192
RUNS, WARM_UP, REPEATS = 7, 3, 5
COPY_BYTES, LINK_BYTES = 2 * 2**30, 256 * 2**20
TINY_KERNELS = 100


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("ceilings.json"), help="default: ceilings.json")
    parser.add_argument("--device", type=int, default=0, help="which card (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace the file that is there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("roofline_probe: this torch sees no CUDA card.")
    if options.output.exists() and not options.force:
        sys.exit(f"roofline_probe: {options.output} exists already; pass --force to replace it.")
    torch.cuda.set_device(options.device)
    ceilings = measure()
    options.output.write_text(json.dumps(ceilings, indent=1) + "\n")
    print(json.dumps(ceilings, indent=1))
    print(f"wrote {options.output}", file=sys.stderr)


def measure() -> dict[str, object]:
    """Every figure of the card in use."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "tonnage_ceilings": FORMAT,
        "gpu": properties.name,
        "torch": torch.__version__,
        "memory_bytes_per_s": copy_rate(),
        "rates": matmul_rates(),
        "host_link_bytes_per_s": link_rate(),
        "kernel_floor_s": kernel_floor_s(),
        "launch_s": launch_s(),
    }


def seconds_of(work: Callable[[], object]) -> float:
    """Of one call: the median of runs, each of several calls back to back."""
    for _ in range(WARM_UP):
        work()
    found = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / REPEATS)
    return median(found)


def copy_rate() -> float:
    """Bytes a second, read and written."""
    free_bytes, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free_bytes // 10)
    source = torch.empty(size // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def matmul_rates() -> dict[str, float]:
    """Operations a second by precision; what the card does not compute natively is left out."""
    torch.set_float32_matmul_precision("highest")
    rates = {"fp16": matmul_rate(torch.float16), "fp32": matmul_rate(torch.float32)}
    if torch.cuda.get_device_capability() >= (8, 0):
        rates["bf16"] = matmul_rate(torch.bfloat16)
        torch.set_float32_matmul_precision("high")
        rates["tf32"] = matmul_rate(torch.float32)
    return rates


def matmul_rate(dtype: torch.dtype) -> float:
    """Of square matrices that fill the card."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * SIDE**3 / seconds_of(lambda: torch.mm(left, right, out=out))


def link_rate() -> float:
    """Bytes a second from pinned memory to the card."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    return LINK_BYTES / seconds_of(lambda: target.copy_(source, non_blocking=True))


def kernel_floor_s() -> float:
    """Of the smallest kernel, without the host."""
    number = torch.zeros(1, device="cuda")
    number.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TINY_KERNELS):
            number.add_(1)
    return seconds_of(graph.replay) / TINY_KERNELS


def launch_s() -> float:
    """Of the host: one small operator, issued and not waited for."""
    number = torch.zeros(1, device="cuda")
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TINY_KERNELS):
            number.add_(1)
        found.append((time.perf_counter() - start) / TINY_KERNELS)
    return median(found)


if __name__ == "__main__":
    main()

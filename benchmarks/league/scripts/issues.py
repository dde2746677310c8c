"""Small programs that people measured and posted in issues; each writes what they printed, in bytes, to `--out`."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("program", choices=("products", "convolution", "ones", "volume"))
parser.add_argument("--fused", action="store_true")
parser.add_argument("--width", type=int, default=0)
parser.add_argument("--count", type=int, default=0)
parser.add_argument("--out", required=True)
options = parser.parse_args()


def products() -> int:
    """Two products, each summed at once; a compiler may take both sums after both products."""
    a, b = (torch.randn(32768, 16, device="cuda") for _ in range(2))
    c = torch.randn(16, 32768, device="cuda")

    def sums() -> torch.Tensor:
        return (a @ c).sum(dim=-1) + (b @ c).sum(dim=-1)

    work = torch.compile(sums) if options.fused else sums
    work()
    torch.cuda.reset_peak_memory_stats()
    cache = torch.empty(64_000_000, dtype=torch.int, device="cuda")  # with which Triton's timer clears the L2 cache
    for _ in range(2):
        cache.zero_()
        work()
    return torch.cuda.max_memory_allocated()


def convolution() -> int:
    """What is allocated after a convolution of half precision whose result is dropped."""
    layer = nn.Conv2d(256, 256, 3, padding=1).half().to("cuda")
    picture = torch.zeros((1, 256, 2048, options.width)).half().to("cuda")
    layer(picture)
    return torch.cuda.memory_allocated()


def ones() -> int:
    """The peak of squares of 256 MiB that are all kept."""
    kept = [torch.ones((8192, 8192)).cuda() for _ in range(options.count)]  # noqa: F841
    return torch.cuda.max_memory_allocated()


def volume() -> int:
    """A convolution over a volume and its input."""
    layer = nn.Conv3d(64, 64, 3, padding=1).to("cuda")  # noqa: F841
    source = torch.randn((1, 64, 24, 512, 512), device="cuda")  # noqa: F841
    return torch.cuda.max_memory_allocated()


found = {"products": products, "convolution": convolution, "ones": ones, "volume": volume}[options.program]()
Path(options.out).write_text(json.dumps({"allocated": found}))

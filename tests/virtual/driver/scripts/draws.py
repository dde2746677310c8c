"""Draws large tensors of the host, which stay unwritten, and checks that torch goes on as after small ones, which are filled.

Many small tensors take the same numbers as a large one: torch fills 16 at a time, and only ends are drawn otherwise.
What is drawn after some modules is printed, to be compared with another run, which may be of this alone: `draws.py modules`.
"""

import sys
from itertools import product

import torch

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# a multiple of 16 or not; the last is passed over by a jump
SIZES = (1024 * 1040, 1021 * 1033, 4096 * 1024 + 8)
SMALL = 1 << 16


def draw(size: int, dtype: torch.dtype, generator: torch.Generator, *, large: bool) -> list[object]:
    """Draw so many numbers at once, or in tensors of less than a MiB that end alike. Returns what is drawn next."""
    parts = [size] if large else [SMALL] * (size // SMALL - 1) + [SMALL + size % SMALL]
    for part in parts:
        torch.empty(part, dtype=dtype).normal_(0, 0.02, generator=generator)
    for part in parts:
        torch.empty(part, dtype=dtype).uniform_(generator=generator)
    return next_numbers(generator)


def next_numbers(generator: torch.Generator) -> list[object]:
    """What is drawn next. Three normal numbers leave a fourth behind for later, as one draw makes two."""
    integers = torch.randint(1 << 30, (3,), generator=generator).tolist()
    return [*integers, *torch.rand(5, generator=generator).tolist(), *torch.randn(3, generator=generator).tolist()]


def compare(generator: torch.Generator, seed: int, types: tuple[torch.dtype, ...]) -> None:
    """Large tensors take what small ones do."""
    generator.manual_seed(seed)
    for dtype, size in product(types, SIZES):
        before = generator.get_state()
        one = draw(size, dtype, generator, large=True)
        generator.set_state(before)
        assert one == draw(size, dtype, generator, large=False), (seed, dtype, size, one)


if sys.argv[1:] != ["modules"]:
    compare(torch.default_generator, 0, TYPES)
    compare(torch.Generator(), 1234567890123, TYPES[:2])
torch.manual_seed(0)
torch.nn.Embedding(3200, 1024)
torch.nn.Linear(2048, 2057)
torch.rand(3000, 1001, dtype=torch.float64)
print("drawn", *next_numbers(torch.default_generator))

"""The convolutions again with torch.backends.cudnn.benchmark: first calls try every algorithm, later ones use the fastest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import convolutions
from .spec import BF16, F32, Case


@contextlib.contextmanager
def benchmarking() -> Iterator[None]:
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def cases() -> Iterator[Case]:
    for index, each in enumerate(convolutions.cases(benchmarking, (F32, BF16))):
        if index % 2 == 0:
            yield each

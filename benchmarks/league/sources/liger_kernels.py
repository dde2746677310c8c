"""Liger-Kernel's own benchmarks: memory of its kernels, run under a CUDA build of torch."""

from functools import partial

from rows import Source
from sources.liger import WHERE, predict, read

SOURCE = Source("liger_kernels", "Liger-Kernel's benchmarks: its kernels", WHERE, partial(read, own=True), predict)

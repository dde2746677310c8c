"""Decoding steps as captured CUDA graphs: one for each of some numbers of rows, the largest first, in one pool of memory.

Captured largest first, the smaller ones find all their memory in what the largest one used. So what a graph leaves behind
(its logits) stands only until the next one runs, and is known by its address alone, which keeps nothing alive. This module
does not know what a step computes.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.budget.own_engine import capture_sizes
from tonnage.garbage import no_collection

Body = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class _Address:
    """Float32 numbers at an address on the device, in the words by which torch takes them over."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.shape, "typestr": "<f4", "data": (self.pointer, False), "version": 3}


class DecodeGraphs:
    """Graphs of `body(rows)`, which reads and writes fixed buffers and returns logits of that many rows.

    `prepare(rows)` fills the buffers with what a body can run on.
    """

    def __init__(self, prepare: Callable[[int], None], body: Body, largest: int, stream: torch.cuda.Stream) -> None:
        self.sizes = capture_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        with no_collection(), torch.inference_mode():
            for size in reversed(self.sizes):
                # Kernels are compiled, and libraries set up, before anything is captured.
                prepare(size)
                body(size)
                stream.synchronize()
                self._capture(body, size, pool, stream)

    def size_for(self, rows: int) -> int:
        """The smallest captured number of rows that holds so many."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, size: int) -> Tensor:
        """Run it; its logits stand until the next run."""
        self._graphs[size].replay()
        return self._logits[size]

    def _capture(self, body: Body, size: int, pool: object, stream: torch.cuda.Stream) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits = body(size)
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        address = _Address(logits.data_ptr(), tuple(logits.shape))
        self._logits[size] = torch.as_tensor(address, device=logits.device)
        self._graphs[size] = graph

"""Decode steps as captured CUDA graphs: one per batch size, the largest first, in one memory pool.

Captured largest first, smaller graphs reuse the memory of the largest. So a graph's logits are valid only until the
next graph runs, and are referenced by address alone, which keeps nothing alive. This module does not know what a
step computes.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.budget.serving.own_engine import capture_sizes
from tonnage.garbage import no_collection

Body = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class _Address:
    """FP32 numbers at a device address, as torch.as_tensor accepts them."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.shape, "typestr": "<f4", "data": (self.pointer, False), "version": 3}


class DecodeGraphs:
    """Graphs of `body(rows)`, which reads buffers that `prepare(rows)` fills, and returns the logits of those rows."""

    def __init__(self, prepare: Callable[[int], None], body: Body, largest: int, stream: torch.cuda.Stream) -> None:
        self.sizes = capture_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        with no_collection(), torch.inference_mode():
            for size in reversed(self.sizes):
                # Compile kernels and initialize libraries before capturing.
                prepare(size)
                body(size)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = body(size)
                assert logits.dtype == torch.float32 and logits.is_contiguous()
                address = _Address(logits.data_ptr(), tuple(logits.shape))
                self._logits[size] = torch.as_tensor(address, device=logits.device)
                self._graphs[size] = graph
                # The address must be all that refers to them when the next size is captured.
                del logits

    def size_for(self, rows: int) -> int:
        """Return the smallest captured size of at least this many rows."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, size: int) -> Tensor:
        """Replay a graph; its logits are valid until the next replay."""
        self._graphs[size].replay()
        return self._logits[size]

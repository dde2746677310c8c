"""CUDA graphs and memory pools: a capture runs its body once, into a private pool; a replay does nothing.

Not modelled: the graph itself (its nodes, its executable and what the driver keeps for it).
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tonnage.allocator import CachingAllocator
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.unmodelled import UnmodelledCall, refusal

PoolId = tuple[int, int]
_NO_CAPTURE = "Called CUDAGraph::replay without a preceding successful capture."
_DEFAULT_STREAM = (
    "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
    "default stream.)"
)


class Pools:
    """The private pools of every card, by PyTorch's ids: (0, n) if made by the user, (n, 0) if by a graph."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards
        self._by_user, self._by_graph = itertools.count(1), itertools.count(1)

    def user_id(self) -> PoolId:
        """Return a new id for `MemPool` or `graph_pool_handle`."""
        return 0, next(self._by_user)

    def graph_id(self) -> PoolId:
        """Return a new id for a graph that was given none."""
        return next(self._by_graph), 0

    def begin(self, index: int, pool: PoolId, accepts: Callable[[int], bool] = lambda stream: True) -> None:
        """Direct requests to the pool from now on, if `accepts(stream)`."""
        try:
            self.cards.at(index).allocator.begin_allocate_to_pool(pool, accepts)
        except AssertionError:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id") from None

    def begin_thread(self, index: int, pool: PoolId) -> None:
        """Direct the calling thread's requests to the pool."""
        thread = threading.get_ident()
        self.begin(index, pool, lambda _: threading.get_ident() == thread)

    def begin_stream(self, index: int, pool: PoolId) -> None:
        """Direct requests on the current stream to the pool."""
        current = self.cards.stream(index)
        self.begin(index, pool, lambda stream: stream == current)


class _Capture:
    """The state of one graph, separate from the Python object because it outlives it briefly."""

    def __init__(self, pools: Pools, seeds: "_Seeds") -> None:
        self.pools, self.seeds = pools, seeds
        self.index, self.stream = -1, 0
        self.streams: set[int] = set()
        self.pool: PoolId | None = None
        self.is_done = False

    def begin(self, pool: PoolId | None) -> None:
        self.seeds.register(self)
        cards = self.pools.cards
        self.index, self.stream = cards.selected, cards.stream()
        if not self.stream:
            raise RuntimeError(_DEFAULT_STREAM)
        self.pool = pool or self.pools.graph_id()
        self.streams = {self.stream}
        self.pools.begin(self.index, self.pool, self.streams.__contains__)
        _open.append(self)

    def end(self) -> None:
        if self not in _open or self.pools.cards.stream() != self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        assert self.pool is not None
        _open.remove(self)
        self.pools.cards.at(self.index).allocator.end_allocate_to_pool(self.pool)
        self.is_done = True

    def reset(self) -> None:
        if self.is_done and self.pool is not None:
            self.pools.cards.at(self.index).allocator.release_pool(self.pool)
        self.is_done = False

    def close(self) -> None:
        self.reset()
        self.seeds.unregister(self)


_open: list[_Capture] = []


def join(event_stream: int, stream: int) -> None:
    """Make a stream part of a capture if it waits for an event of a captured stream."""
    for capture in _open:
        if event_stream in capture.streams:
            capture.streams.add(stream)


class _Seeds:
    """The generator's seed and offset on the device, allocated while any graph exists."""

    def __init__(self) -> None:
        self._graphs: set[_Capture] = set()
        self._tensors: list[torch.Tensor] = []

    def register(self, graph: _Capture) -> None:
        if not self._graphs:
            self._tensors = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
        self._graphs.add(graph)

    def unregister(self, graph: _Capture) -> None:
        self._graphs.discard(graph)
        if not self._graphs:
            self._tensors.clear()


def _graph_base(pools: Pools) -> type:
    seeds = _Seeds()

    class _CUDAGraph:
        """The base of PyTorch's `CUDAGraph`."""

        _capture: _Capture

        def __new__(cls, keep_graph: bool = False) -> Any:
            self = super().__new__(cls)
            self._capture = _Capture(pools, seeds)
            weakref.finalize(self, self._capture.close).atexit = False
            return self

        def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
            self._capture.begin(pool)

        def capture_end(self) -> None:
            self._capture.end()

        def replay(self) -> None:
            if not self._capture.is_done:
                raise RuntimeError(_NO_CAPTURE)

        def reset(self) -> None:
            self._capture.reset()

        def pool(self) -> PoolId:
            if self._capture.pool is None:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._capture.pool

        def instantiate(self) -> None:
            pass

        def register_generator_state(self, generator: Any) -> None:
            pass

        def enable_debug_mode(self) -> None:
            pass

        debug_dump = raw_cuda_graph = raw_cuda_graph_exec = refusal("the nodes of a CUDA graph")

    return _CUDAGraph


def _pool_base(pools: Pools) -> type:
    class _MemPool:
        """The base of PyTorch's `MemPool`."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(cls)

        def __init__(
            self, allocator: Any = None, is_user_created: bool = True, use_on_oom: bool = False, no_split: bool = False
        ) -> None:
            if allocator is not None or use_on_oom or no_split:
                raise UnmodelledCall("a MemPool with an allocator of its own, use_on_oom or no_split")
            self.device = pools.cards.selected
            self.allocator = None
            self._id = pools.user_id() if is_user_created else pools.graph_id()
            self._memory = pools.cards.at().allocator
            self._memory.create_pool(self._id)

            def drop(memory: CachingAllocator = self._memory, pool: PoolId = self._id) -> None:
                memory.release_pool(pool)
                memory.empty_cache(pool)

            weakref.finalize(self, drop).atexit = False

        @property
        def id(self) -> PoolId:
            return self._id

        def use_count(self) -> int:
            return self._memory.pool_use_count(self._id)

    return _MemPool


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions, and new bases for PyTorch's own classes."""
    pools = Pools(cards)

    def is_capturing() -> bool:
        stream = cards.stream()
        return any(stream in capture.streams for capture in _open)

    functions = {
        "_CUDAGraph": _graph_base(pools),
        "_MemPool": _pool_base(pools),
        "_graph_pool_handle": pools.user_id,
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_beginAllocateToPool": pools.begin,
        "_cuda_beginAllocateCurrentThreadToPool": pools.begin_thread,
        "_cuda_beginAllocateCurrentStreamToPool": pools.begin_stream,
        "_cuda_endAllocateToPool": lambda index, pool: cards.at(index).allocator.end_allocate_to_pool(pool),
        "_cuda_releasePool": lambda index, pool: cards.at(index).allocator.release_pool(pool),
        "_cuda_checkPoolLiveAllocations": lambda index, pool, expected: True,
    }
    patches.set_all(torch._C, functions)
    for module in (torch.cuda.graphs, torch.cuda.memory):
        patches.set_all(module, {name: value for name, value in functions.items() if hasattr(module, name)})
    patches.set(torch.cuda.graphs.CUDAGraph, "__bases__", (functions["_CUDAGraph"],))
    patches.set(torch.cuda.memory.MemPool, "__bases__", (functions["_MemPool"],))
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
    patches.on_undo(_open.clear)

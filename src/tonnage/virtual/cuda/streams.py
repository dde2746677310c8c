"""Streams and events, CUDA graphs and memory pools.

Ids, pools of streams and the current stream are native. Nothing runs, so everything has always finished. A capture
runs its body once, into a private pool; a replay does nothing. Not modelled: the graph itself (its nodes, its
executable and what the driver keeps for it).

PyTorch created `Stream` and `Event` at import from empty base classes. A class based on C structures cannot get
another base later, so the file that defines them, torch/cuda/streams.py, is executed again with real bases.
"""

import importlib.util
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tonnage.allocator import CachingAllocator
from tonnage.virtual.cuda.cards import Cards, UnmodelledCall, refusal
from tonnage.virtual.cuda.patches import Patches

CUDA = 1  # c10::DeviceType
_NATIVE_STREAM, _LEVEL_SHIFT, _LEVELS = 1, 1, 15  # a pool's stream has an odd id; see native/device.cpp
PoolId = tuple[int, int]  # as PyTorch numbers pools: (0, n) if made by the user, (n, 0) if by a graph
_NO_CAPTURE = "Called CUDAGraph::replay without a preceding successful capture."
_DEFAULT_STREAM = (
    "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
    "default stream.)"
)


class _CudaStreamBase(torch.Stream):
    """A native stream of a card; its handle is its id."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
    ) -> Any:
        if stream_id or device_index or device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        index = torch._C._cuda_getDevice()
        if stream_ptr:
            return super().__new__(cls, stream_id=stream_ptr, device_index=index, device_type=CUDA)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    cuda_stream = torch.Stream.stream_id

    @property
    def priority(self) -> int:
        """0 for an ordinary stream, negative for higher priority."""
        return 1 - (self.stream_id >> _LEVEL_SHIFT & _LEVELS) if self.stream_id & _NATIVE_STREAM else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


class _CudaEventBase(torch.Event):
    """A native event; elapsed times are the host's."""

    _is_timed: bool
    _recorded_ns: int | None
    _stream_id: int

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        self = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        self._is_timed, self._recorded_ns, self._stream_id = enable_timing, None, -1
        return self

    def record(self, stream: torch.Stream) -> None:
        super().record(stream)
        self._stream_id, self._recorded_ns = stream.stream_id, time.perf_counter_ns()

    def wait(self, stream: torch.Stream) -> None:
        """Return at once; if the event's stream is captured, so is this one from now on."""
        super().wait(stream)
        for capture in _captures:
            if self._stream_id in capture.streams:
                capture.streams.add(stream.stream_id)

    cuda_event = torch.Event.event_id  # the handle; 0 until the event is recorded

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two events."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._recorded_ns - self._recorded_ns) / 1e6

    ipc_handle = refusal("events that are shared between processes")
    from_ipc_handle = classmethod(refusal("events that are shared between processes"))


class _Streams:
    """The functions of `torch._C` about streams, captures and pools, under their names there."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards
        self.by_user, self.by_graph = itertools.count(1), itertools.count(1)
        self.graphs: set[_Capture] = set()
        self.seeds: list[torch.Tensor] = []  # the generator's seed and offset on the card, while any graph exists

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        if device_index != self.cards.selected:
            self.cards.selected = device_index
        self.cards.library.tonnage_set_stream(device_index, stream_id)

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        stream = self.cards.stream()
        return any(stream in capture.streams for capture in _captures)

    def _cuda_beginAllocateToPool(
        self, index: int, pool: PoolId, accepts: Callable[[int], bool] = lambda stream: True
    ) -> None:
        """Direct requests to the pool from now on, if `accepts(stream)`."""
        try:
            self.cards.at(index).allocator.begin_allocate_to_pool(pool, accepts)
        except AssertionError:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id") from None

    def _cuda_beginAllocateCurrentThreadToPool(self, index: int, pool: PoolId) -> None:
        thread = threading.get_ident()
        self._cuda_beginAllocateToPool(index, pool, lambda _: threading.get_ident() == thread)

    def _cuda_beginAllocateCurrentStreamToPool(self, index: int, pool: PoolId) -> None:
        self._cuda_beginAllocateToPool(index, pool, self.cards.stream(index).__eq__)


class _Capture:
    """The state of one graph, separate from the Python object because it outlives it briefly."""

    def __init__(self) -> None:
        self.index, self.stream = -1, 0
        self.streams: set[int] = set()
        self.pool: PoolId | None = None
        self.is_done = False

    def reset(self, owner: _Streams) -> None:
        if self.is_done and self.pool is not None:
            owner.cards.at(self.index).allocator.release_pool(self.pool)
        self.is_done = False

    def close(self, owner: _Streams) -> None:
        self.reset(owner)
        owner.graphs.discard(self)
        if not owner.graphs:
            owner.seeds.clear()


_captures: list[_Capture] = []


def _graph_base(owner: _Streams) -> type:
    class _CUDAGraph:
        """The base of PyTorch's `CUDAGraph`."""

        _capture: _Capture

        def __new__(cls, keep_graph: bool = False) -> Any:
            self = super().__new__(cls)
            self._capture = _Capture()
            weakref.finalize(self, self._capture.close, owner).atexit = False
            return self

        def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
            if not owner.graphs:
                owner.seeds = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
            capture = self._capture
            owner.graphs.add(capture)
            capture.index, capture.stream = owner.cards.selected, owner.cards.stream()
            if not capture.stream:
                raise RuntimeError(_DEFAULT_STREAM)
            capture.pool, capture.streams = pool or (next(owner.by_graph), 0), {capture.stream}
            owner._cuda_beginAllocateToPool(capture.index, capture.pool, capture.streams.__contains__)
            _captures.append(capture)

        def capture_end(self) -> None:
            capture = self._capture
            if capture not in _captures or owner.cards.stream() != capture.stream:
                raise RuntimeError("Capture must end on the same stream it began on.")
            assert capture.pool is not None
            _captures.remove(capture)
            owner.cards.at(capture.index).allocator.end_allocate_to_pool(capture.pool)
            capture.is_done = True

        def replay(self) -> None:
            if not self._capture.is_done:
                raise RuntimeError(_NO_CAPTURE)

        def reset(self) -> None:
            self._capture.reset(owner)

        def pool(self) -> PoolId:
            if self._capture.pool is None:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._capture.pool

        def instantiate(self) -> None: ...
        def register_generator_state(self, generator: Any) -> None: ...
        def enable_debug_mode(self) -> None: ...

        debug_dump = raw_cuda_graph = raw_cuda_graph_exec = refusal("the nodes of a CUDA graph")

    return _CUDAGraph


def _pool_base(owner: _Streams) -> type:
    class _MemPool:
        """The base of PyTorch's `MemPool`."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(cls)

        def __init__(
            self, allocator: Any = None, is_user_created: bool = True, use_on_oom: bool = False, no_split: bool = False
        ) -> None:
            if allocator is not None or use_on_oom or no_split:
                raise UnmodelledCall("a MemPool with an allocator of its own, use_on_oom or no_split")
            self.device = owner.cards.selected
            self.allocator = None
            self._id = (0, next(owner.by_user)) if is_user_created else (next(owner.by_graph), 0)
            self._memory = owner.cards.at().allocator
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
    """Supply the functions and base classes, then give PyTorch's own classes these bases."""
    streams = _Streams(cards)

    def handle(stream_id: int, index: int) -> tuple[int, int, int]:
        return stream_id, cards.selected if index < 0 else index, CUDA

    bases = {"_CUDAGraph": _graph_base(streams), "_MemPool": _pool_base(streams)}
    functions = {
        "_cuda_getCurrentRawStream": cards.stream,
        "_cuda_getCurrentStream": lambda index: handle(cards.stream(index), index),
        "_cuda_getDefaultStream": lambda index: handle(0, index),
        "_cuda_getStreamFromExternal": handle,
        "_cuda_endAllocateToPool": lambda index, pool: cards.at(index).allocator.end_allocate_to_pool(pool),
        "_cuda_releasePool": lambda index, pool: cards.at(index).allocator.release_pool(pool),
        "_graph_pool_handle": lambda: (0, next(streams.by_user)),
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        **bases,
    }
    patches.set_methods(torch._C, streams)
    patches.set_all(torch._C, functions)
    # Streams and events
    spec = importlib.util.find_spec("torch.cuda.streams")
    assert spec is not None and spec.loader is not None, "torch.cuda.streams has no source"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patches.set_item(sys.modules, "torch.cuda.streams", module)
    patches.set(torch.cuda, "streams", module)
    for name in ("Stream", "Event", "ExternalStream"):
        patches.set(torch.cuda, name, getattr(module, name))
    # Graphs and pools: functions that these modules imported by name
    supplied = {*functions, *vars(_Streams), "_cuda_checkPoolLiveAllocations"}
    for module in (torch.cuda.graphs, torch.cuda.memory):
        names = [name for name in supplied & set(vars(module)) if not name.startswith("__")]
        patches.set_all(module, {name: getattr(torch._C, name) for name in names})
    patches.set(torch.cuda.graphs.CUDAGraph, "__bases__", (bases["_CUDAGraph"],))
    patches.set(torch.cuda.memory.MemPool, "__bases__", (bases["_MemPool"],))
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
    patches.on_undo(_captures.clear)

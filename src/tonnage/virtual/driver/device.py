"""One virtual card under a CUDA build of torch: torch's own allocator runs, and its actions are read from a log.

The stand-in libraries log blocks in the order in which torch's allocator returned them (native/observe.c). They are
taken from the log when the outermost operator on a thread ends, while the requesting stack is still the current one.
Requested bytes and streams are filled in later from torch's memory history. That is recorded without stacks from CUDA's
initialisation on; if a script records its own history, that one is read, and ours resumes when the script's has ended.
"""

import ctypes
import os
import struct
import threading
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from typing import Any

from tonnage.allocator import Shortage
from tonnage.garbage import no_collection
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.recording.records import MarkKind, SegmentAction
from tonnage.virtual import host_memory
from tonnage.virtual.driver.loading import installed_release
from tonnage.virtual.recorded import RecordedDevice

# `TnEvent` of native/core.h: kind, device, address, size, serial, thread, operation, dtype, dims, reserved, shape
_EVENT = struct.Struct("=iiQqqQiiii8q")
_AT_ONCE = ctypes.c_int64(4096)
_ALLOC, _FREE, _OOM, _WORKSPACE = 1, 2, 7, 12
_HOST = {8: host_memory.ALLOCATED, 9: host_memory.FREED, 10: host_memory.PINS, 11: host_memory.SENT}
_SEGMENTS: dict[int, SegmentAction] = {3: "segment_alloc", 4: "segment_free", 5: "segment_map", 6: "segment_unmap"}
# c10::ScalarType, by number
_DTYPES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32 bfloat16 "
    "quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 "
    "uint32 uint64"
).split()
_ACQUIRING = ("segment_alloc", "segment_map")
_NO_NODE = 2**63  # gradients are accumulated by nodes that no operator created


class DriverDevice(RecordedDevice):
    """The record of one card, read from the stand-ins' log."""

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int], core: ctypes.CDLL, torch: Any) -> None:
        super().__init__(gpu, torch_version)
        self.release = installed_release()
        self._core = core
        self._torch = torch
        self._buffer = ctypes.create_string_buffer(_EVENT.size * _AT_ONCE.value)
        self._operators: list[str] = []
        self._draining: set[int] = set()  # thread ids
        self._communicators: dict[str, int] = {}
        self._granted = False
        self.on_freed: Callable[[int], None] = lambda address: None
        core.tn_name.restype = ctypes.c_char_p
        core.tn_new_stream.restype = ctypes.c_void_p
        core.tn_take_events.restype = core.tn_free_bytes.restype = ctypes.c_int64
        self._next_sequence = ctypes.CDLL("libtorch_cpu.so")["_ZN2at15sequence_number4peekEv"]
        self._next_sequence.restype = ctypes.c_uint64
        # By thread: the modules that ran, with the first autograd sequence number of each.
        self._nodes: dict[int, list[int]] = defaultdict(list)
        self._contexts: dict[int, list[int]] = defaultdict(list)

    def lift_limit(self) -> None:
        self._core.tn_lift_limit(1)

    def grants(self, segment_bytes: int) -> bool:
        """Whether to grant a request that exceeds the card; torch has already freed its cache."""
        settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
        if self.going_on is None or any("max_split_size" in text for text in settings):
            return False  # with max_split_size set, torch may try a third time
        with no_collection():
            self.drain()
            allocated = sum(a.block_bytes for a in self.live.values())
            reserved = sum(s.size_bytes if s.action in _ACQUIRING else -s.size_bytes for s in self.segments)
            outside = sum(self.overhead_parts.values())
            shortage = Shortage(
                device=0, requested_bytes=segment_bytes, segment_bytes=segment_bytes, capacity_bytes=self.gpu.memory_bytes,
                free_bytes=max(0, self.gpu.memory_bytes - outside - reserved), allowed_bytes=None,
                process_bytes=outside + reserved, allocated_bytes=allocated, reserved_bytes=reserved, private_pool_bytes=0,
            )  # fmt: skip
            self.failed(
                self._module(), requested_bytes=segment_bytes, free_bytes=shortage.free_bytes,
                allocated_bytes=allocated, reserved_bytes=reserved, message=shortage.message,
            )  # fmt: skip
            if self.going_on.grants(shortage):
                self._granted = True  # the operator that asked is logged with its block
                return True
            self.ooms.pop()
        return False

    def memory_stats(self) -> dict[str, int]:
        return dict(self._torch.cuda.memory_stats()) if self._torch.cuda.is_initialized() else defaultdict(int)

    @property
    def overhead_parts(self) -> dict[str, int]:
        parts: dict[str, int] = {}
        for name, overhead in self.gpu.overheads.items():
            for handle in range(1, 1 + self._core.tn_part_uses(name.encode())):
                parts[name if handle == 1 else f"{name} {handle}"] = overhead.size_bytes
        return parts | self._communicators

    def synchronize(self) -> None:
        self._core.tn_device_synchronize()

    def hold(self, parts: dict[str, int]) -> None:
        for name, size in parts.items():
            if name not in self._communicators:
                self._core.tn_add_outside(0, ctypes.c_int64(size))
        self._communicators |= parts

    def begin_copy(self, tensors: Iterable[Any]) -> Any:
        stream = self._torch.cuda.ExternalStream(self._core.tn_new_stream(0, 0))  # torch reuses its own streams
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                tensor.record_stream(stream)
        return stream

    def end_copy(self, copy: Any) -> None:
        self._core.tn_finish_stream(ctypes.c_void_p(copy.cuda_stream))

    # Called by the attribution: everything logged so far belongs to the previous state

    def mark(self, kind: MarkKind, name: str = "") -> None:
        self.drain()
        super().mark(kind, name)

    def at_module(self, context: int) -> None:
        self.drain()
        thread = threading.get_ident()
        self._nodes[thread].append(self._next_sequence())
        self._contexts[thread].append(context)

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        self.drain()
        super().categorise(category, addresses, only)

    # The log

    def catch_up(self) -> None:
        """Read the log; called after operators that left entries in it, and from time to time."""
        self.drain()
        if self.attribution.host and threading.get_ident() not in self._draining:
            self.attribution.host.tick()

    def drain(self) -> None:
        """Read everything from the log. Reentrant calls, from marks that a block causes, do nothing."""
        here = threading.get_ident()
        if here in self._draining:
            return
        self._draining.add(here)
        try:
            while count := self._core.tn_take_events(self._buffer, _AT_ONCE):
                self._take(ctypes.string_at(self._buffer, count * _EVENT.size))
        finally:
            self._draining.discard(here)

    def _take(self, events: bytes) -> None:
        place = module = None
        for event in _EVENT.iter_unpack(events):
            kind, card, address, size, serial, _, operation, dtype, dims, _, *shape = event
            if kind == _ALLOC:
                self.cards.add(card)
                if self.on_request is not None:
                    self.on_request()
                operator, extents = self._operator(operation), tuple(shape[:dims]) if dtype >= 0 else None
                dtype_name = _DTYPES[dtype] if 0 <= dtype < len(_DTYPES) else ""
                if self._granted:
                    self._granted = False
                    self.ooms[-1] = replace(
                        self.ooms[-1], requested_bytes=size, operator=operator, shape=extents, dtype=dtype_name
                    )
                if place is None:
                    place, module = self.attribution.place(), self._module()
                self.allocated(address, size, size, 0, operator, module or "", serial, extents, dtype_name, place)
            elif kind == _FREE:
                self.freed(address, serial)
                self.on_freed(address)
            elif kind == _WORKSPACE:
                super().categorise(Category.WORKSPACE, [address], None)
            elif kind == _OOM:
                self.failed(
                    self._module(), requested_bytes=size, free_bytes=self._core.tn_free_bytes(0),
                    allocated_bytes=shape[0], reserved_bytes=shape[1], operator=self._operator(operation),
                )  # fmt: skip
            elif kind in _HOST:
                if self.attribution.host:
                    self.attribution.host.event(_HOST[kind], address, abs(size), self._operator(operation))
            elif kind in _SEGMENTS:
                self.segment_changed(_SEGMENTS[kind], address, size, 0)

    def _operator(self, number: int) -> str:
        while len(self._operators) <= number:
            self._operators.append(self._core.tn_name(len(self._operators)).decode())
        return self._operators[number]

    def _module(self) -> str:
        """Return the current module; in backward, the one whose forward created the node."""
        who = self.attribution
        if who.modules:
            return who.modules[-1]
        node = self._torch._C._current_autograd_node() if who.phase == "backward" else None
        number = node._sequence_nr() if node is not None else _NO_NODE
        # First look for nodes created by recomputation on this thread.
        for thread in (threading.get_ident(), who.main_thread):
            at = bisect_right(self._nodes[thread], number) - 1
            if at >= 0 and number < _NO_NODE:
                return who.contexts[self._contexts[thread][at]]
        return ""


_MOST_ENTRIES = 2**62


class DriverTrace:
    """Entries read so far, in order: allocations with size and stream, and segments with their stream."""

    def __init__(self, device: DriverDevice, torch: Any) -> None:
        self._device = device
        self._torch = torch
        self._first = self._first_segment = 0
        self._record = torch._C._cuda_record_memory_history
        self._is_on = self._is_ours = self._is_ours_to_come = False
        self._taken: Counter[int] = Counter()  # entries read, by card

    def install(self) -> Callable[[], None]:
        """Start when CUDA is initialised; the returned function stops it."""
        torch = self._torch
        plain_empty_cache = torch._C._cuda_emptyCache

        def record(enabled: str | None, *arguments: Any, **keywords: Any) -> Any:
            if self._is_ours_to_come:
                return self._record(enabled, *arguments, **keywords)
            self.take()
            self._is_ours = False
            result = self._record(enabled, *arguments, **keywords)
            self._taken.clear()
            if enabled is None:
                self._begin()
            return result

        def empty_cache(*arguments: Any) -> Any:
            self._device.mark("empty_cache")
            return plain_empty_cache(*arguments)

        torch._C._cuda_record_memory_history, torch._C._cuda_emptyCache = record, empty_cache
        torch.cuda._lazy_call(self._begin)

        def undo() -> None:
            self.take()
            if self._is_ours:
                self._set(None)
            self._is_on = self._is_ours = False
            torch._C._cuda_record_memory_history, torch._C._cuda_emptyCache = self._record, plain_empty_cache

        return undo

    def _begin(self) -> None:
        self._set("all")
        self._is_on = self._is_ours = True
        self._taken.clear()

    def _set(self, enabled: str | None) -> None:
        """Use torch's public function, because the native one has different parameters in every version."""
        record = self._torch.cuda.memory._record_memory_history
        self._is_ours_to_come = True
        try:
            if "clear_history" in signature(record).parameters:
                record(enabled, context=None, max_entries=_MOST_ENTRIES, clear_history=True)
            else:
                # Before torch 2.8, history is cleared by stopping it.
                record(None)
                record(enabled, context=None, max_entries=_MOST_ENTRIES)
        finally:
            self._is_ours_to_come = False

    def take(self) -> None:
        """Read what torch has recorded since the last time, and add it to the recorded blocks and segments."""
        if not self._is_on:
            return
        device, streams = self._device, []
        blocks: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # by address: each card has its own history
        device.drain()
        for card, entries in enumerate(self._torch.cuda.memory._snapshot()["device_traces"]):
            for entry in entries[self._taken[card] :]:
                action = entry["action"]
                if action == "alloc":
                    blocks[entry["addr"]].append((entry["size"], entry["stream"]))
                elif action in _SEGMENTS.values():
                    streams.append(entry["stream"])
            self._taken[card] = len(entries)
        if self._is_ours:
            self._begin()  # clears what was read
        count = sum(map(len, blocks.values()))
        for allocation in device.allocations[self._first : self._first + count]:
            assert blocks[allocation.address], "torch's history and the log differ in their blocks"
            allocation.requested_bytes, allocation.stream = blocks[allocation.address].popleft()
        self._first += count
        for at, stream in enumerate(streams, self._first_segment):
            if at < len(device.segments):
                device.segments[at] = replace(device.segments[at], stream=stream)
        self._first_segment += len(streams)

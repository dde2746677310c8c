"""Reads torch's own memory history, which knows the requested bytes and the stream of each block.

It is recorded without stacks from CUDA's initialisation on. If a script records its own history, that one is read,
and ours resumes when the script's has ended.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

from tonnage.virtual.driver.device import DriverDevice

_MOST_ENTRIES = 2**62
_SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


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
                elif action in _SEGMENTS:
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

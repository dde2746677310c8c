"""Memory history and snapshots, as `torch.cuda.memory._record_memory_history` records them and PyTorch's viewer opens
them.

Stacks have Python frames only, whatever `stacks` says, and the frames of this package are left out.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tonnage.allocator.blocks import PENDING, Block
from tonnage.recording.records import Allocation
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.device import Device

Entry = dict[str, Any]
Frames = list[dict[str, Any]]
_PACKAGE = Path(__file__).parent.parent.parent
_HIDDEN = (str(_PACKAGE), "<frozen runpy>")
_RUNNER = str(_PACKAGE / "virtual" / "script.py")  # the script's stack ends here
_NEVER, _STATE, _ALLOC, _ALL = range(4)
_CONTEXTS = {None: _NEVER, "state": _STATE, "alloc": _ALLOC, "all": _ALL}
_FREES = frozenset(("free_requested", "free_completed", "segment_free", "segment_unmap"))


class Ring:
    """A ring buffer of the last `limit` entries. Lowering the limit keeps existing entries and overwrites them."""

    def __init__(self) -> None:
        self.limit = 0
        self._entries: list[Entry] = []
        self._next = 0

    def add(self, entry: Entry) -> None:
        """Append an entry, or overwrite the oldest."""
        if len(self._entries) < self.limit:
            self._entries.append(entry)
        elif self._entries:
            self._entries[self._next] = entry
            self._next = (self._next + 1) % self.limit

    def clear(self) -> None:
        self._entries.clear()
        self._next = 0

    def in_order(self) -> list[Entry]:
        return self._entries[self._next :] + self._entries[: self._next]


class DeviceHistory:
    """One card's trace and the stacks of its live blocks. It is `device.history` from start to stop."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.trace = Ring()
        self.metadata = ""
        self.when = _NEVER
        self.skipped: frozenset[str] = frozenset()
        self._frames: dict[int, tuple[int, Frames]] = {}
        self._segment_frames: dict[int, Frames] = {}
        self._pending: list[tuple[Block, Allocation]] = []
        self._known: dict[tuple[CodeType, int], dict[str, Any]] = {}

    def stop(self) -> None:
        """Stop recording and clear the trace; the stacks of live blocks are kept."""
        self.device.history = None
        self.trace.clear()

    # Called by the device

    def allocated(self, allocation: Allocation) -> None:
        self._complete_frees()
        if self.when >= _STATE:
            self._frames[allocation.address] = allocation.index, self._stack()
        self.record("alloc", allocation.address, allocation.requested_bytes, allocation.stream)

    def freed(self, allocation: Allocation, block: Block) -> None:
        """Record that a block was freed; the free completes once no stream uses the block."""
        self._complete_frees()
        self._frames.pop(allocation.address, None)
        self.record("free_requested", allocation.address, allocation.requested_bytes, allocation.stream)
        self._pending.append((block, allocation))
        self._complete_frees()

    def segment(self, action: str, address: int, size: int, stream: int) -> None:
        """Record that memory was taken from the card, given back, or short ("oom": `address` is then the free bytes)."""
        if action in ("segment_alloc", "segment_map") and self.when >= _STATE:
            self._segment_frames[address] = self._stack()
        elif action in _FREES:
            self._segment_frames.pop(address, None)
        self.record(action, address, size, stream)

    def _complete_frees(self) -> None:
        pending, self._pending = self._pending, []
        for block, allocation in pending:
            if block.state == PENDING:
                self._pending.append((block, allocation))
            else:
                self.record("free_completed", allocation.address, allocation.requested_bytes, allocation.stream)

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        if action in self.skipped:
            return
        entry: Entry = {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time.time_ns() // 1000,
            "compile_context": "N/A",
            "user_metadata": self.metadata,
        }
        if action != "snapshot" and self.when >= (_ALL if action in _FREES else _ALLOC):
            entry["frames"] = self._stack()
        self.trace.add(entry)

    def _stack(self) -> Frames:
        frames: Frames = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != _RUNNER:
            code = frame.f_code
            shown = self._known.get((code, frame.f_lasti))
            if shown is None:
                hidden = code.co_filename.startswith(_HIDDEN)
                shown = {} if hidden else {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
                self._known[code, frame.f_lasti] = shown
            if shown:
                frames.append(shown)
            frame = frame.f_back
        return frames

    # Snapshots

    def segments(self) -> list[dict[str, Any]]:
        """Return the allocator's segments with the recorded stacks."""
        self._complete_frees()
        segments = self.device.allocator.snapshot()
        for segment in segments:
            segment["frames"] = self._segment_frames.get(segment["address"], [])
            for block in segment["blocks"]:
                block["frames"] = self.frames_of(block["address"]) or []
        return segments

    def frames_of(self, address: int) -> Frames | None:
        """Return the stack that allocated a live block, if it was recorded."""
        index, frames = self._frames.get(address, (-1, []))
        live = self.device.live.get(address)
        return frames if live is not None and live.index == index else None


class _Histories:
    """The functions of `torch._C` about history, under their names there, over all cards."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards
        self.histories = [DeviceHistory(device) for device in cards.devices]
        self.annotations: list[Entry] = []

    def _cuda_record_memory_history(
        self, enabled: str | None, context: str | None, stacks: str, max_entries: int, clear_history: bool = False,
        compile_context: bool = False, global_record_annotations: bool = False, skip_actions: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start or stop recording, with the parameters of all releases."""
        for is_right, message in (
            (enabled in (None, "state", "all"), "expected state to be 'state', 'all', or None"),
            (context in _CONTEXTS, "expected context to be 'state', 'alloc', 'all', or None"),
            (stacks in ("python", "all"), "expected stacks to be 'python', or 'all'"),
        ):
            if not is_right:
                raise RuntimeError(message)
        torch.cuda._lazy_init()
        for history in self.histories:
            if clear_history or enabled is None:
                history.trace.clear()
                self.annotations.clear()
            if enabled is None:
                history.stop()
                continue
            history.when, history.skipped = _CONTEXTS[context], frozenset(skip_actions)
            history.trace.limit = max_entries if enabled == "all" else 1
            history.device.history = history

    def _cuda_record_memory_history_legacy(
        self, enabled: bool, record_context: bool = True, trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False, record_context_cpp: bool = False, clear_history: bool = False,
        compile_context: bool = False, global_record_annotations: bool = False, skip_actions: Sequence[str] = (),
    ) -> None:  # fmt: skip
        context = "alloc" if trace_alloc_record_context else "state" if record_context else None
        state, entries = "all" if enabled else None, trace_alloc_max_entries
        self._cuda_record_memory_history(state, context, "all", entries, clear_history, skip_actions=skip_actions)

    def _cuda_isHistoryEnabled(self) -> bool:
        return self.cards.at().history is not None

    def _cuda_memorySnapshot(self, pool: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return a snapshot. `pool` may be a pool's id, with a flag for traces as a third item."""
        wanted = tuple(pool[:2]) if pool else (0, 0)
        with_traces = bool(pool[2]) if pool and len(pool) > 2 else True
        segments = [segment for history in self.histories for segment in history.segments()]
        taken = {
            "segments": [s for s in segments if wanted in ((0, 0), s["segment_pool_id"])],
            "device_traces": [history.trace.in_order() if with_traces else [] for history in self.histories],
            "allocator_settings": self.cards.at(0).allocator.settings.as_snapshot(),
            "external_annotations": list(self.annotations),
        }
        for history in self.histories:
            if history.device.history is history:
                active = history.device.memory_stats()["active_bytes.all.current"]
                history.record("snapshot", 0, active, 0)
        return taken

    def _cuda_allocationTraceback(self, address: int) -> Frames | None:
        return next((f for f in (history.frames_of(address) for history in self.histories) if f is not None), None)

    def _cuda_setMemoryMetadata(self, metadata: str) -> None:
        for history in self.histories:
            history.metadata = metadata

    def _cuda_getMemoryMetadata(self) -> str:
        return self.histories[0].metadata


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions, and record `record_function` regions."""
    histories = _Histories(cards)
    patches.set_methods(torch._C, histories)
    for history in histories.histories:
        patches.on_undo(history.stop)
    region = torch.autograd.profiler.record_function
    plain_enter, plain_exit = region.__enter__, region.__exit__

    def annotate(stage: str, name: str) -> None:
        if histories._cuda_isHistoryEnabled():
            now = time.time_ns() // 1000
            histories.annotations.append({"stage": stage, "name": name, "device": cards.selected, "time_us": now})

    def enter(self: Any) -> Any:
        annotate("START", self.name)
        return plain_enter(self)

    def leave(self: Any, *error: Any) -> Any:
        try:
            return plain_exit(self, *error)
        finally:
            annotate("END", self.name)

    patches.set_all(region, {"__enter__": enter, "__exit__": leave})

"""Counts the host memory of a run, as a real run would need it.

Large CPU tensors count in full when they are allocated, although here they may never be written; pages of mapped
files when a copy reads them, although nothing is read for a virtual card. The rest of the process (interpreter,
libraries, Python objects) is real, so it is measured from time to time, minus what the virtual GPU itself takes.
"""

import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from tonnage.ledger import Category
from tonnage.recording import host
from tonnage.recording.host import HostMoment, HostPeaks, groups_of
from tonnage.script.lines import NOWHERE, ScriptPlace
from tonnage.virtual import process_memory
from tonnage.virtual.driver.loading import is_cuda_build, torch_root
from tonnage.virtual.process_memory import MappedFile, Resident, footprint_bytes, takes_huge_pages

if TYPE_CHECKING:
    from tonnage.virtual.recorded import RecordedDevice

ALLOCATED, FREED, PINS, READ, SENT, TICK = range(6)  # as in native/bridge.h
LARGE_BYTES = 1 << 20
# Measuring the process takes milliseconds: at most this share of the time is spent on it.
_SHARE = 0.02
_SHORTEST_S = 0.1
_GLANCE_S = 0.02  # a tenth of a millisecond each
# Approximate size of one Python record of a block on the card
_RECORD_BYTES = 400


@dataclass(slots=True, eq=False)
class _Block:
    """A large tensor's storage, or a pinned block."""

    size: int
    rounding: int  # what the allocator takes in addition
    part: str
    operator: str
    line: str


@dataclass(slots=True)
class _Height:
    """The peak of a phase. Its blocks are saved when the first of them is freed."""

    needed: int = -1
    step: int = 0
    place: ScriptPlace = NOWHERE
    blocks: tuple[_Block, ...] | None = None
    beside: dict[str, int] | None = None


class HostMeter:
    """The host's memory ledger while a script runs."""

    def __init__(self, device: "RecordedDevice") -> None:
        self._device = device
        self._live: dict[int, _Block] = {}
        self._tensor_bytes = 0
        self._files = _Files()
        self._beside: dict[str, int] = {}
        self._heights: dict[str, _Height] = {}
        self._open: _Height | None = None  # the peak whose blocks the next free saves
        self._mapped_peak = (0, 0)
        self._resident_peak = 0
        self._own = Resident()
        self._kept: dict[int, int] = {}  # freed blocks that torch's allocator has not returned to the system
        self._cuda_bytes = 0  # 0 in a process that never uses the card
        self._import_bytes = 0  # what importing a CUDA build takes in addition to the installed torch
        self._place = NOWHERE
        self._reading_checkpoint = 0
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._next_look = self._next_glance = 0.0
        self._rounds = takes_huge_pages(torch_root())

    # Start and end

    def install(self, torch: Any) -> Callable[[], None]:
        """Start counting; the returned function stops it."""
        plain, now = process_memory.plain_process(torch_root()), process_memory.resident()
        # May be negative where stand-ins replace larger libraries.
        self._own = Resident(now.anonymous_bytes - plain.anonymous_bytes, now.file_bytes - plain.file_bytes)
        if not is_cuda_build(torch_root()):
            imported = self._device.gpu.overheads["torch"].host_bytes
            self._import_bytes = max(imported - plain.anonymous_bytes - plain.file_bytes, 0)
        self._look()
        load = torch.load

        @wraps(load)
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self._reading_checkpoint += 1
            try:
                return load(*arguments, **keywords)
            finally:
                self._reading_checkpoint -= 1

        torch.load = counted

        def registered(module: Any, name: str, parameter: Any) -> None:
            self._modules.add(module)
            if parameter is not None and parameter.is_cpu:
                self._mark(parameter)

        hook = torch.nn.modules.module.register_module_parameter_registration_hook(registered)

        def undo() -> None:
            self._look(self._place)
            hook.remove()
            if torch.load is counted:
                torch.load = load

        return undo

    def memory(self) -> HostPeaks | None:
        """Return the peaks so far."""
        self._save_blocks()
        moments = []
        for phase, height in self._heights.items():
            blocks, parts = height.blocks or (), dict(height.beside or {})
            for block in blocks:
                parts[block.part] = parts.get(block.part, 0) + block.size
            parts[host.ROUNDING] = sum(block.rounding for block in blocks)
            moments.append(
                HostMoment(
                    phase=phase, step=height.step, line=height.place.line, stack=height.place.stack,
                    parts={part: size for part, size in parts.items() if size},
                    largest=groups_of((block.part, block.line, block.operator, block.size) for block in blocks),
                )
            )  # fmt: skip
        return HostPeaks(
            phases=tuple(moments),
            mapped_peak_bytes=self._mapped_peak[0],
            mapped_file_bytes=self._mapped_peak[1],
            resident_peak_bytes=self._resident_peak,
            machine_bytes=process_memory.machine_bytes(),
        )

    # Events

    def event(self, kind: int, address: int, size: int, operator: str) -> None:
        """Handle an event of the host's allocators and copies, of 1 MiB or more."""
        if kind == FREED:
            block = self._live.get(address)
            if block is None:
                return
            self._save_blocks()
            del self._live[address]
            self._tensor_bytes -= block.size + block.rounding
            if process_memory.is_mapped(address):
                self._kept[address] = block.size
            return
        if kind == TICK:
            self.tick()
            return
        place = self._place = self._device.attribution.place()
        if kind == ALLOCATED and not operator and process_memory.is_shared(address):
            return  # a mapped file or shared memory, which torch reports like its own blocks
        if kind in (READ, SENT):
            if not self._files.read(address, size, really=kind == READ):
                return
        else:
            part = (
                host.PINNED if kind == PINS else host.CHECKPOINT if self._reading_checkpoint else Category.OTHER.value
            )
            rounding = footprint_bytes(size) - size if self._rounds and kind == ALLOCATED else 0
            self._kept.pop(address, None)
            self._live[address] = _Block(size, rounding, part, operator.removeprefix("aten::"), place.line)
            self._tensor_bytes += size + rounding
        self.tick()  # after the block is recorded: a CUDA build may have written it before the event
        self._rises(place)

    def tick(self) -> None:
        """Measure the process if that is due, or at least the file pages it has read."""
        now = time.perf_counter()
        if now >= self._next_look:
            self._look()
        elif now >= self._next_glance:
            self._next_glance = now + _GLANCE_S
            self._rises(self._device.attribution.place())

    def card_used(self) -> None:
        """Update what CUDA holds on the host."""
        known = self._device.gpu.overheads
        held = self._import_bytes + sum(known[p].host_bytes for p in list(self._device.overhead_parts) if p in known)
        if held != self._cuda_bytes:
            self._cuda_bytes = held
            self.tick()
            self._rises(self._device.attribution.place())

    def categorise(self, category: Category, addresses: Iterable[int]) -> None:
        """Set the category of these tensors."""
        for address in addresses:
            block = self._live.get(address)
            if block and block.part != host.PINNED:
                block.part = category.value

    def _mark(self, parameter: Any) -> None:
        try:
            address = parameter.data_ptr() - parameter.storage_offset() * parameter.element_size()
        except (RuntimeError, ValueError):  # a subclass without its own storage, or a lazy parameter without a shape
            return
        block = self._live.get(address)
        if block and block.part in (host.CHECKPOINT, Category.OTHER):
            block.part = Category.PARAMETERS.value

    # Peaks

    def _rises(self, place: ScriptPlace) -> None:
        who = self._device.attribution
        self._files.grow(process_memory.resident().file_bytes)
        mapped, size = self._files.bytes
        needed = self._tensor_bytes + sum(self._beside.values()) + self._cuda_bytes
        if mapped > self._mapped_peak[0]:
            self._mapped_peak = mapped, size
        self._resident_peak = max(self._resident_peak, needed + mapped)
        height = self._heights.get(who.phase)
        if height is None:
            height = self._heights[who.phase] = _Height()
        if needed > height.needed:
            height.needed, height.step, height.place = needed, who.step, place
            height.blocks, height.beside = None, self._beside | {host.CUDA: self._cuda_bytes, host.MAPPED: mapped}
            self._open = height

    def _save_blocks(self) -> None:
        if self._open:
            self._open.blocks = tuple(self._live.values())
            self._open = None

    # The process

    def _look(self, place: ScriptPlace | None = None) -> None:
        began = time.thread_time()
        self._device.drain()
        now = process_memory.resident()
        self._files.look(now.file_bytes)
        tensors = _AddressRanges()
        # Copies: threads that load a model allocate blocks meanwhile.
        live = [(address, block.size) for address, block in list(self._live.items())]
        for address, size in [*self._kept.items(), *live]:
            tensors.add(address, address + size)
        written = process_memory.resident_bytes(tensors)
        records = _RECORD_BYTES * len(self._device.allocations)
        libraries = max(now.file_bytes - self._files.resident_bytes - self._own.file_bytes, 0)
        objects = max(now.anonymous_bytes - written - self._own.anonymous_bytes - records, 0)
        self._save_blocks()
        self._beside = {
            host.PYTHON: objects, host.LIBRARIES: libraries, host.WORKERS: process_memory.of_children(),
            host.SHARED: now.shared_bytes,
        }  # fmt: skip
        for module in list(self._modules):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_cpu:
                    self._mark(parameter)
        self._rises(place or self._device.attribution.place())
        took = time.thread_time() - began
        self._next_look = time.perf_counter() + max(took / _SHARE, _SHORTEST_S)


class _Files:
    """Mapped files, and which of their bytes were read, really or by a copy to the virtual card."""

    def __init__(self) -> None:
        self._mapped: list[MappedFile] = []
        self._resident: dict[MappedFile, int] = {}
        # Ranges that were read: by copies to the virtual card only (False), or really (True)
        self._reads: dict[bool, dict[MappedFile, _AddressRanges]] = {False: {}, True: {}}
        self._no_files: set[int] = set()  # addresses of storages that are not in files
        self._read_since = 0  # file bytes that the process has read since the last look
        self._process_bytes = 0  # file bytes in memory at that look

    def read(self, address: int, size: int, *, really: bool) -> bool:
        """Count these bytes as read by a copy; return False if they are not in a file."""
        file = self._find(address)
        if file is None:
            return False
        self._reads[really].setdefault(file, _AddressRanges()).add(address, min(address + size, file.end))
        return True

    def grow(self, process_bytes: int) -> None:
        """Attribute the growth of the process's file pages since the last look to the mapped files."""
        self._read_since = max(process_bytes - self._process_bytes, 0)
        unread = sum(file.end - file.start for file in self._resident) - self.resident_bytes
        if self._read_since >= max(unread, LARGE_BYTES):  # from a file mapped since then
            self.look(process_bytes)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes that were read and are still mapped, and the total size of their files."""
        files = set(self._resident).union(*self._reads.values())
        if not all(process_memory.is_mapped(file.start) for file in files):
            self.look(process_memory.resident().file_bytes)
            files = set(self._resident).union(*self._reads.values())
        sent, copied = (sum(ranges.total for ranges in reads.values()) for reads in self._reads.values())
        size = sum(file.end - file.start for file in files)
        return min(max(self.resident_bytes + (self._read_since if files else 0), copied) + sent, size), size

    @property
    def resident_bytes(self) -> int:
        """Bytes of the files that are really in memory."""
        return sum(self._resident.values())

    def look(self, process_bytes: int) -> None:
        """Update which files are mapped and how many of their pages are in memory."""
        self._process_bytes, self._read_since = process_bytes, 0
        self._mapped = process_memory.mapped_files()
        self._no_files.clear()
        for reads in self._reads.values():
            for file in set(reads) - set(self._mapped):
                del reads[file]
        self._resident = process_memory.read_pages(self._mapped)

    def _find(self, address: int) -> MappedFile | None:
        for attempt in range(2):
            at = bisect_right(self._mapped, address, key=lambda file: file.start) - 1
            if at >= 0 and address < self._mapped[at].end:
                return self._mapped[at]
            if attempt or address in self._no_files:
                break
            self._mapped = process_memory.mapped_files()
        self._no_files.add(address)
        return None


class _AddressRanges:
    """Address ranges, each byte counted once."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((start, end - start) for start, end in zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """Add the range [start, end), merged with ranges that it touches."""
        first = bisect_right(self._ends, start - 1)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self.total -= sum(e - s for s, e in zip(self._starts[first:last], self._ends[first:last], strict=True))
        self.total += end - start
        self._starts[first:last], self._ends[first:last] = [start], [end]

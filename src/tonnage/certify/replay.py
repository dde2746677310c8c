"""Run an allocator through a program: natively if there is a C compiler, else in Python, a hundred times slower."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from ctypes import CDLL, c_double, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from tonnage.allocator.blocks import Block
from tonnage.certify.program import Op, RecordedProgram, TemplateOp
from tonnage.virtual.cache import cache_folder, check_code, make_safe

SOURCE = Path(__file__).parent / "native" / "replay.c"
_FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Failure:
    """The request that a card cannot satisfy."""

    part: int
    line: str
    requested_bytes: int
    segment_bytes: int
    free_bytes: int  # of the card, or below the cap
    allocated_bytes: int
    reserved_bytes: int

    @property
    def short_bytes(self) -> int:
        """Bytes that it would need more."""
        return max(self.segment_bytes - self.free_bytes, 1)


@dataclass(frozen=True)
class Lived:
    """The outcome of a program on a card: the peaks of each part reached, and where it ended."""

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    failure: Failure | None
    unknown_frees: int = 0
    outside_bytes: int = 0
    retries: int = 0  # times that the cache was emptied to satisfy a request
    first_retry: int = -1  # index of the part

    @property
    def peak_bytes(self) -> int:
        """The most that the process holds."""
        return max(self.reserved_bytes) + self.outside_bytes

    @property
    def peak_part(self) -> int:
        """Index of the part that needs most."""
        return max(range(len(self.reserved_bytes)), key=lambda at: (self.reserved_bytes[at], self.allocated_bytes[at]))


def live_through(program: RecordedProgram, capacity_bytes: int, settings: AllocatorSettings) -> Lived:
    """Run the whole program, until it ends or a request fails."""
    library = native_library()
    if library is None:
        return in_python(program, capacity_bytes, settings)
    machine = library.tn_new(
        capacity_bytes, settings.max_split_bytes, settings.max_non_split_rounding_bytes, settings.large_segment_bytes,
        settings.garbage_collection_threshold, settings.expandable_segments,
    )  # fmt: skip
    rounded = settings.rounded_bytes if settings.rounds_to_divisions else lambda size: (size + 511) & -512 or 512
    kept = []
    for template in program.templates:
        events = array("q", template.events)
        for at in range(0, len(events), 4):
            if events[at] == TemplateOp.TAKE:
                events[at + 2] = rounded(events[at + 2])
        kept.append(events)
        address, count = events.buffer_info()
        library.tn_template(machine, template.number, address, count // 4, template.slots)
    operations = array("q", program.operations)
    for at in operations_of(operations):
        if operations[at] == Op.TAKE:
            operations[at + 2] = rounded(operations[at + 2])
    address, count = operations.buffer_info()
    parts = len(program.parts) + 1
    allocated, reserved, result = (c_uint64 * parts)(), (c_uint64 * parts)(), (c_int64 * 10)()
    try:
        end = library.tn_run(machine, address, count, allocated, reserved, result)
    finally:
        library.tn_delete(machine)
    event, last, requested, segment, free, held, taken, unknown, retries, first_retry = result
    # The cap and the bytes outside the allocator where it ended, and the request that failed.
    state, failure = {Op.ALLOWED: -1, Op.OUTSIDE: 0}, None
    for at in takewhile(lambda at: at < end, operations_of(operations)):
        if operations[at] in state:
            state[operations[at]] = operations[at + 1]
    if end < count:
        if operations[end] == Op.CALL:
            template = program.templates[operations[end + 1]]
            line = template.lines[template.events[4 * event + 1]]
        else:
            line = program.block_lines[operations[end + 1]]
        free = free if state[Op.ALLOWED] < 0 else min(free, max(state[Op.ALLOWED] - taken, 0))
        failure = Failure(last, line, requested, segment, free, held, taken)
    peaks = list(allocated[: last + 1]), list(reserved[: last + 1])
    return Lived(*peaks, failure, unknown, state[Op.OUTSIDE], retries, first_retry)


@cache
def native_library() -> CDLL | None:
    """Return the compiled replay; None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    source = SOURCE.read_bytes()
    target = cache_folder() / f"replay-{hashlib.sha256(source + platform.machine().encode()).hexdigest()[:20]}.so"
    if not target.exists():
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            done = subprocess.run([compiler, *_FLAGS, "-o", str(built), str(SOURCE)], capture_output=True, check=False)
            if done.returncode:
                return None
            make_safe(built)
            built.replace(target)
    library = CDLL(str(check_code(target)))
    library.tn_new.restype = c_void_p
    library.tn_new.argtypes = [c_uint64, c_uint64, c_uint64, c_uint64, c_double, c_int]
    library.tn_template.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64]
    library.tn_run.restype = c_int64
    library.tn_run.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]
    library.tn_delete.argtypes = [c_void_p]
    return library


def operations_of(operations: "array[int]") -> Iterator[int]:
    lengths = {Op.TAKE: 4, Op.GIVE: 2, Op.GIVE_SLOT: 3, Op.PART: 1, Op.EMPTY: 1, Op.OUTSIDE: 2, Op.ALLOWED: 2}
    at = 0
    while at < len(operations):
        yield at
        at += lengths[operations[at]] if operations[at] != Op.CALL else 4 + operations[at + 3]


def in_python(program: RecordedProgram, capacity_bytes: int, settings: AllocatorSettings) -> Lived:
    """Like `live_through`, with the Python model of the allocator."""
    allocator = CachingAllocator(capacity_bytes, settings)
    counters, operations = allocator.counters, program.operations
    blocks: dict[tuple[int, int], Block] = {}
    allocated, reserved = [0], [0]
    unknown = outside = 0
    first_retry = -1

    def take(owner: tuple[int, int], size: int, stream: int) -> None:
        nonlocal first_retry
        try:
            blocks[owner] = allocator.malloc(size, stream)
        finally:
            if first_retry < 0 and counters.alloc_retries:
                first_retry = len(allocated) - 1
        allocated[-1] = max(allocated[-1], counters.allocated_bytes)
        reserved[-1] = max(reserved[-1], counters.reserved_bytes)

    def give(owner: tuple[int, int]) -> None:
        nonlocal unknown
        block = blocks.pop(owner, None)
        if block is None:
            unknown += 1
        else:
            allocator.free(block)

    line, failure = "", None
    try:
        for at in operations_of(operations):
            operation = operations[at]
            if operation == Op.TAKE:
                line = program.block_lines[operations[at + 1]]
                take((-1, operations[at + 1]), operations[at + 2], operations[at + 3])
            elif operation == Op.GIVE:
                give((-1, operations[at + 1]))
            elif operation == Op.CALL:
                template, instance = program.templates[operations[at + 1]], operations[at + 2]
                events = template.events
                for row in range(0, len(events), 4):
                    kind, slot, size, stream = events[row : row + 4]
                    if kind == TemplateOp.TAKE:
                        line = template.lines[slot]
                        take((instance, slot), size, stream)
                    elif kind == TemplateOp.GIVE:
                        give((instance, slot))
                    elif kind == TemplateOp.GIVE_ARGUMENT:
                        give((operations[at + 4 + slot], size))
                    else:
                        allocator.empty_cache()
            elif operation == Op.GIVE_SLOT:
                give((operations[at + 1], operations[at + 2]))
            elif operation == Op.PART:
                allocated.append(counters.allocated_bytes)
                reserved.append(counters.reserved_bytes)
            elif operation == Op.EMPTY:
                allocator.empty_cache()
            elif operation == Op.OUTSIDE:
                allocator.outside_bytes = outside = operations[at + 1]
            elif operation == Op.ALLOWED:
                allocator.allowed_bytes = None if operations[at + 1] < 0 else operations[at + 1]
                allocator.settings = settings  # the setter also checks whether garbage collection has a limit
    except OutOfMemory as error:
        short = error.shortage
        free = short.free_bytes
        if short.allowed_bytes is not None:
            free = min(free, max(short.allowed_bytes - short.reserved_bytes, 0))
        rounded = settings.rounded_bytes(short.requested_bytes)
        failure = Failure(
            len(allocated) - 1, line, rounded, short.segment_bytes, free, short.allocated_bytes, short.reserved_bytes
        )
    return Lived(allocated, reserved, failure, unknown, outside, counters.alloc_retries, first_retry)

"""Limits on everything that a snapshot file can make grow."""

from dataclasses import dataclass

from tonnage.units import GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotLimits:
    """The limits of a snapshot. The defaults allow several million events, and keep any file under 1 GiB of memory.

    `object_bytes` limits the memory of the pickle's objects, counted as they are created. It may be at most
    `objects_per_byte` times what was read; a real snapshot needs a third of that, a decompression bomb a hundred
    times as much.
    """

    file_bytes: int = 2 * GIB
    inflated_bytes: int = 2 * GIB
    object_bytes: int = 896 * MIB
    objects_per_byte: int = 10
    string_bytes: int = 64 * 1024
    integer_bytes: int = 9
    nested_marks: int = 64
    stack_items: int = 1 << 20
    memo_entries: int = 16_000_000
    frames: int = 1 << 20
    dict_keys: int = 1024
    dict_shapes: int = 4096
    devices: int = 1024
    events: int = 4_000_000
    blocks: int = 2_000_000
    stack_depth: int = 4096
    size_bytes: int = 1 << 50

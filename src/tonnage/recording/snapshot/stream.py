"""Reads a snapshot in bounded pieces, never whole, decompresses gzip, and limits all that a file can make grow."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tonnage.errors import BadSnapshot
from tonnage.units import GIB, MIB, format_bytes
from tonnage.untrusted import GZIP_MAGIC, open_file

_GZIP_WINDOW = 31
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotLimits:
    """The limits of a snapshot: several million events, and any file under 1 GiB of memory.

    `object_bytes` limits the memory of the pickle's objects, at most `objects_per_byte` times what was read; a real snapshot
    needs a third of that, a decompression bomb a hundred times as much.
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


class Stream:
    """Reads forward only; raises BadSnapshot when the size limit is exceeded."""

    def __init__(self, file: BinaryIO, limits: SnapshotLimits) -> None:
        self._file, self._limits = file, limits
        self._read_bytes = 0
        self._given_bytes = 0
        self._pending = self._take()
        self._inflater = zlib.decompressobj(_GZIP_WINDOW) if self._pending.startswith(GZIP_MAGIC) else None

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; fewer only at the end."""
        pieces = []
        while count > 0 and (piece := self._next(count)):
            pieces.append(piece)
            count -= len(piece)
        data = b"".join(pieces)
        self._given_bytes += len(data)
        if self._given_bytes > self._limits.inflated_bytes:
            raise BadSnapshot(f"It holds more than {format_bytes(self._limits.inflated_bytes)}.")
        return data

    def _take(self) -> bytes:
        chunk = self._file.read(_CHUNK_BYTES)
        self._read_bytes += len(chunk)
        if self._read_bytes > self._limits.file_bytes:
            raise BadSnapshot(f"The file is larger than {format_bytes(self._limits.file_bytes)}.")
        return chunk

    def _next(self, count: int) -> bytes:
        """Return at most `count` bytes; none at the end."""
        inflater = self._inflater
        if inflater is None:
            piece, self._pending = self._pending[:count], self._pending[count:]
            if not self._pending:
                self._pending = self._take()
            return piece
        while not inflater.eof:
            try:
                piece = inflater.decompress(self._pending, count)
            except zlib.error as error:
                raise BadSnapshot(f"Its gzip is damaged: {error}.") from None
            self._pending = inflater.unconsumed_tail or (b"" if inflater.eof else self._take())
            if piece:
                return piece
            if not self._pending and not inflater.eof:
                raise BadSnapshot("Its gzip ends in the middle.")
        return b""


def opening(path: Path, count: int = 16) -> bytes:
    """Return the first bytes of a file, decompressed if gzipped; b"" if that fails."""
    try:
        with open_file(path) as file:
            return Stream(file, SnapshotLimits()).read(count)
    except (OSError, BadSnapshot):
        return b""

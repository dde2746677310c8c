"""Reads a snapshot file in bounded pieces, decompressing gzip. The whole file is never in memory."""

import zlib
from pathlib import Path
from typing import BinaryIO

from tonnage.errors import BadSnapshot
from tonnage.recording.snapshot.limits import SnapshotLimits
from tonnage.units import format_bytes
from tonnage.untrusted import GZIP_MAGIC, open_file

_GZIP_WINDOW = 31
_CHUNK_BYTES = 1 << 18


class Stream:
    """Reads forward only; raises BadSnapshot when the size limit is exceeded."""

    def __init__(self, file: BinaryIO, limits: SnapshotLimits) -> None:
        self._file = file
        self._limits = limits
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
        if self._inflater is not None:
            return self._inflate(count)
        piece, self._pending = self._pending[:count], self._pending[count:]
        if not self._pending:
            self._pending = self._take()
        return piece

    def _inflate(self, count: int) -> bytes:
        inflater = self._inflater
        assert inflater is not None
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

"""Read files from outside: nothing blocks on a pipe, inflates a zip bomb, overflows the stack or is executed."""

import errno
import gzip
import io
import json
import os
import re
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

GZIP_MAGIC = b"\x1f\x8b"
# None of our files nests deeper than ten.
MOST_DEPTH = 64
# A gzip may hold this much, and beyond it this many times its own size: profiles compress to a tenth or a thirtieth.
_GRACE_BYTES = 32 * 2**20
_MOST_RATIO = 100
# A parsed empty list takes twenty times its text. If more than one byte in sixteen opens one, the text is little else.
_BYTES_PER_BRACKET = 16
_ALL_BUT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
# Control characters except tabs and line ends, and lone surrogates, as JSON escapes them.
_UNPRINTABLE = re.compile(
    rb"\xc2[\x80-\x9f]|\\u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])"
    rb"|\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2})|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2}",
    re.IGNORECASE,
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r")) + b"\x7f"
_WITHOUT_CONTROLS = bytes.maketrans(_CONTROLS, b"?" * len(_CONTROLS))
_LONGEST_WORDS = 800


class Unreadable(ValueError):
    """Why a file cannot be read, as the rest of a sentence after its name: "is not a file"."""


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError also for a pipe, which would block, or a device, which may be endless."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(errno.EINVAL, "It is a pipe or a device, not a file")
        return path.open("rb")
    except ValueError:  # a null in its name
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None


def read_bytes(path: Path, most_bytes: int, *, inflate: bool = False) -> bytes:
    """Return the bytes of a file, decompressed if they are gzipped and `inflate` is set."""
    try:
        with open_file(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    if inflate and data.startswith(GZIP_MAGIC) and len(data) <= most_bytes:
        most_bytes = min(most_bytes, _GRACE_BYTES + _MOST_RATIO * len(data))
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as inflated:
                data = inflated.read(most_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"is damaged: {error}") from None
    if len(data) > most_bytes:
        raise Unreadable(f"holds more than {most_bytes // 2**20} MiB")
    return data


def parse_json(data: bytes, *, errors: str = "strict") -> Any:
    """Return the value of a JSON text of limited depth, control characters and lone surrogates as question marks."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_DEPTH:
        # Only brackets outside strings nest.
        bare = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_MARKS).replace(b'""', b"")
        marks = re.sub(rb'"[^"]*"?', b"", bare)
        if max(accumulate(map(_STEPS.__getitem__, marks)), default=0) > MOST_DEPTH:
            raise Unreadable(f"is nested too deeply: more than {MOST_DEPTH} levels")
    if len(data) > _GRACE_BYTES and brackets * _BYTES_PER_BRACKET > len(data):
        raise Unreadable(f"holds {brackets:,} lists and objects, and little in them")
    if b"\\u" in data or b"\xc2" in data:
        data = _UNPRINTABLE.sub(rb"\\u003f", data)
    try:
        return json.loads(data.decode("utf-8-sig", errors))
    except UnicodeDecodeError:
        raise Unreadable("is not text") from None
    except ValueError as error:
        raise Unreadable(f"is not JSON: {str(error).partition(':')[0]}") from None


def parse_text(data: bytes) -> str:
    """Return the text of a file, with terminal control characters replaced by question marks."""
    return data.translate(_WITHOUT_CONTROLS).decode("utf-8", errors="replace")


def printable(text: str) -> str:
    """Replace terminal control characters and lone surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line."""
    return "\n".join(map(printable, text.split("\n")))


def clipped(text: str, length: int = _LONGEST_WORDS) -> str:
    """Return printable lines, with the middle omitted if they are too long."""
    lines = printable_lines(text)
    return lines if len(lines) <= length else f"{lines[: length // 2]} … {lines[-length // 2 :]}"

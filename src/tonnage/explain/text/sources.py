"""Where a text comes from: a file, standard input, or the clipboard."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import BinaryIO

from tonnage.errors import RequestError
from tonnage.untrusted import GZIP_MAGIC, open_file

_READERS = (
    ("wl-paste", "--no-newline"),
    ("xclip", "-selection", "clipboard", "-out"),
    ("xsel", "--clipboard", "--output"),
    ("pbpaste",),
    ("powershell.exe", "-NoProfile", "-Command", "Get-Clipboard"),
)
_WAIT_SECONDS = 10
_HEAD_BYTES = 4096
_SQLITE = b"SQLite format 3\0"
_PICKLE = b"\x80"
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"%PDF")
# Text has no control characters except tabs, line ends, form feeds and escape codes.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\x0c\x1b\x08\x07"))


def is_text(path: Path) -> bool:
    """Say whether a file should be read as text: no recording, snapshot or other binary data. Raises for images."""
    try:
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False  # opening it later reports why
    if head.startswith(_PICTURES):
        problem = f"{path.name} is a picture, and the words in it are not read."
        raise RequestError(problem, hint="Copy the error as text, and paste it: tonnage explain -, then Ctrl-D.")
    return not _is_binary(head)


def standard_input() -> BinaryIO:
    """Return what is piped in."""
    if sys.stdin is None:
        hint = "Pipe a log into it: python train.py 2>&1 | tonnage explain -"
        raise RequestError("Standard input is closed.", hint=hint)
    if sys.stdin.isatty():
        print("tonnage: paste the error, then Ctrl-D on a line of its own", file=sys.stderr)
    stream = sys.stdin.buffer
    head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES] if isinstance(stream, BufferedReader) else b""
    if _is_binary(head):
        hint = "Recordings and snapshots are named: tonnage explain FILE"
        raise RequestError("Standard input is not text.", hint=hint)
    return stream


def clipboard() -> BinaryIO:
    """Return the clipboard, read by the first available program."""
    for command in _readers():
        try:
            done = subprocess.run(command, capture_output=True, timeout=_WAIT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return BytesIO(done.stdout)
    if not any(_readers()):
        names = ", ".join(reader[0] for reader in _READERS[:4])
        hint = "Save the error to a file, or paste it: tonnage explain -, then Ctrl-D."
        raise RequestError(f"The clipboard cannot be read: none of {names} is here.", hint=hint)
    hint = "Copy the whole error, with its traceback, and try again."
    raise RequestError("There is no text on the clipboard.", hint=hint)


def _readers() -> Iterator[tuple[str, ...]]:
    return (reader for reader in _READERS if shutil.which(reader[0]))


def _is_binary(head: bytes) -> bool:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, as Windows' shell writes
        return False
    return head.startswith((_SQLITE, _PICKLE, GZIP_MAGIC)) or len(head.translate(None, _CONTROLS)) < len(head)

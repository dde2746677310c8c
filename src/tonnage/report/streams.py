"""Who may write to standard output, and how it is spelled where an encoding lacks a sign. It does not know what is said."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unicodedata import normalize

# One sign for one, wherever that is possible, so that columns stay columns.
_LOOK_ALIKES = dict(zip("█▉▊▋▌▍▎▏", "#####...", strict=True)) | {
    **dict(zip("▁▂▃▄▅▆▇", "_.-=+*%", strict=True)),
    **dict(zip("━╸─│┌┐└┘├┤", "=--|++++++", strict=True)),
    **dict(zip("…·×÷–—−µ✓✗◂→←", "~|x/---u+-<><", strict=True)),
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "≠": "!=",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "\xa0": " ",
}

# What Python does with such signs where nobody told it: on output, on standard error, and in the C locale.
_NOT_CHOSEN = ("strict", "backslashreplace", "surrogateescape")


@contextmanager
def data_on_stdout(wanted: bool) -> Iterator[None]:
    """While the block runs, what anyone prints goes to standard error, so that standard output is data alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def use_look_alikes(*streams: Any) -> None:
    """Let streams write "#" for "█" and the like where their encoding (ASCII, cp1252) has no place for it.

    A stream that was told what to do with such signs (`PYTHONIOENCODING=ascii:replace`) goes on doing it.
    """
    codecs.register_error("tonnage.look_alike", _look_alike)
    for stream in streams:
        if getattr(stream, "errors", "") in _NOT_CHOSEN and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="tonnage.look_alike")


def _look_alike(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    # A look-alike, the letter without its accents, or "?".
    plain = (normalize("NFKD", sign).encode("ascii", "ignore").decode() for sign in signs)
    return "".join(
        _LOOK_ALIKES.get(sign) or letter or "?" for sign, letter in zip(signs, plain, strict=True)
    ), error.end

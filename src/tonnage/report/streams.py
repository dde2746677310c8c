"""Control of standard output: who may write to it, and substitutes for characters that its encoding lacks."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unicodedata import normalize

# One character for one wherever possible, to keep columns aligned.
_LOOK_ALIKES = dict(zip("█▉▊▋▌▍▎▏", "#####...", strict=True)) | {
    **dict(zip("▁▂▃▄▅▆▇", "_.-=+*%", strict=True)),
    **dict(zip("━╸─│┌┐└┘├┤", "=--|++++++", strict=True)),
    **dict(zip("…·×÷–—−µ✓✗◂→←", "~|x/---u+-<><", strict=True)),
    **dict(zip("≈’‘“”\xa0", "~''\"\" ", strict=True)),
    **dict(zip("≤≥≠", ("<=", ">=", "!="), strict=True)),
}

# Python's default error handlers: on output, on standard error, and in the C locale.
_NOT_CHOSEN = ("strict", "backslashreplace", "surrogateescape")


@contextmanager
def data_on_stdout(wanted: bool) -> Iterator[None]:
    """Redirect prints to standard error while the block runs, so that standard output has only data."""
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
    """Let streams write "#" for "█" and the like if their encoding (ASCII, cp1252) lacks it.

    A stream with a configured error handler (`PYTHONIOENCODING=ascii:replace`) keeps it.
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
    letters = ((sign, normalize("NFKD", sign).encode("ascii", "ignore").decode()) for sign in signs)
    return "".join(_LOOK_ALIKES.get(sign) or letter or "?" for sign, letter in letters), error.end

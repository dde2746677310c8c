"""Redirects what a script and its children write, with the native library: on Linux."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tonnage.virtual.redirect.build import library_path
from tonnage.virtual.redirect.safetensors_files import install_safetensors

VARIABLE = "TONNAGE_REDIRECT"  # the scratch folder, for children
_PRELOAD = "LD_PRELOAD"


class NativeRedirector:
    """Points the C library's functions at those of the native library."""

    def __init__(self) -> None:
        self._undo_safetensors: Callable[[], None] = lambda: None

    def variables(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables that redirect children."""
        preloaded = os.environ.get(_PRELOAD)
        library = str(library_path())
        return {
            VARIABLE: str(scratch),
            _PRELOAD: f"{library}:{preloaded}" if preloaded else library,
        }

    def begin(self, scratch: Path) -> None:
        """Redirect from here on."""
        if _library().tonnage_redirect_begin(os.fsencode(scratch)):
            raise OSError(f"the native library cannot use {scratch}")
        self._undo_safetensors = install_safetensors()

    def end(self) -> None:
        """Write in place again."""
        self._undo_safetensors()
        _library().tonnage_redirect_end()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let this thread read and write in place."""
        _library().tonnage_redirect_pause(1)
        try:
            yield
        finally:
            _library().tonnage_redirect_pause(0)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    library.tonnage_redirect_begin.argtypes = [ctypes.c_char_p]
    return library

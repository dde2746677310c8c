"""Starts and ends the redirection of a process and its children, and tells what was written."""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from tonnage.errors import OutputExists, RequestError
from tonnage.recording.writes import MOST_FILES, ScriptWrites
from tonnage.virtual.redirect.build import library_path
from tonnage.virtual.redirect.safetensors_files import install_safetensors
from tonnage.virtual.redirect.scratch import ScratchFolder, summary
from tonnage.virtual.redirect.settings import (
    folders_in_place,
    folders_of_compiled_modules,
    offline_environment,
)

_VARIABLE = "TONNAGE_REDIRECT"  # the scratch folder, for children
_PRELOAD = "LD_PRELOAD"


class Redirection:
    """A context in which whatever is written goes to a scratch folder.

    At its end the files are discarded, or moved to the folder `keep`. With `in_place` nothing is redirected. Inside
    another redirection it does nothing: what is written is the outer one's.
    """

    def __init__(self, *, keep: Path | None = None, in_place: bool = False) -> None:
        self.writes: ScriptWrites | None = None  # known at the end
        self._keep = check_keep(keep, in_place)
        self._in_place = in_place
        self._through: list[str] = []
        self._folder = Path.cwd()
        self._scratch: ScratchFolder | None = None
        self._saved_environment: dict[str, str | None] = {}
        self._undo_safetensors: Callable[[], None] = lambda: None

    @property
    def is_active(self) -> bool:
        """Whether this redirection itself redirects."""
        return self._scratch is not None

    def __enter__(self) -> "Redirection":
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Redirect from here on."""
        if self._in_place:
            self.writes = ScriptWrites(fate="in place")
            return
        if os.environ.get(_VARIABLE):
            return
        library = _library()
        self._folder = Path(os.path.realpath(Path.cwd()))
        scratch = ScratchFolder()
        scratch.prepare([*folders_in_place(os.environ), *self._through], folders_of_compiled_modules())
        self._set_environment(scratch)
        if library.tonnage_redirect_begin(os.fsencode(scratch.path)):
            self._restore_environment()
            scratch.remove()
            raise RequestError(
                f"The scratch folder {scratch.path} cannot be used to keep the script's writes.",
                hint="Name another place for it with TMPDIR, or let the script write in place with --write.",
            )
        self._scratch = scratch
        self._undo_safetensors = install_safetensors()

    def write_through(self, folder: str | Path) -> None:
        """Let what is written to this folder be written in place; call it before the beginning."""
        self._through.append(os.path.realpath(folder))

    def empty(self) -> None:
        """Forget what was written so far: the script begins again."""
        if self._scratch is not None:
            self._scratch.empty()

    def end(self) -> None:
        """Write in place again; list what was written, and keep or discard it."""
        if self._scratch is None:
            return
        scratch, self._scratch = self._scratch, None
        self._undo_safetensors()
        _library().tonnage_redirect_end()
        self._restore_environment()
        writes = summary(scratch.changes(self._folder), MOST_FILES)
        if self._keep is not None:
            scratch.keep(self._keep, self._folder)
            writes = replace(writes, fate="kept", kept_in=str(self._keep))
        self.writes = writes
        scratch.remove()

    def _set_environment(self, scratch: ScratchFolder) -> None:
        preloaded = os.environ.get(_PRELOAD)
        library = str(library_path())
        variables = {
            **offline_environment(scratch.path),
            _VARIABLE: str(scratch.path),
            _PRELOAD: f"{library}:{preloaded}" if preloaded else library,
        }
        for name, value in variables.items():
            self._saved_environment[name] = os.environ.get(name)
            os.environ[name] = value

    def _restore_environment(self) -> None:
        for name, value in self._saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved_environment.clear()


def check_keep(keep: Path | None, in_place: bool) -> Path | None:
    """Return the absolute folder for the files, which must be new or empty, before anything runs."""
    if keep is None:
        return None
    if in_place:
        raise RequestError(
            "The script's files cannot be both kept apart and written in place.",
            hint="Leave out --keep or --write.",
        )
    keep = keep.absolute()
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OutputExists(
            f"{keep} exists and is not an empty folder.",
            hint="Name a new folder for the files that the script writes.",
        )
    return keep


@cache
def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise RequestError(
            f"Keeping a script from changing your files needs Linux, and this is {sys.platform}.",
            hint="Let the script write in place with --write, in a copy of its folder.",
        )
    library = ctypes.CDLL(str(library_path()))
    library.tonnage_redirect_begin.argtypes = [ctypes.c_char_p]
    return library

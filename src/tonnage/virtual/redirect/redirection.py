"""Starts and ends the redirection of a process and its children, and tells what was written."""

import os
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tonnage.errors import OutputExists, RequestError, TonnageError
from tonnage.recording.writes import MOST_FILES, ScriptWrites
from tonnage.virtual.redirect.native_library import VARIABLE, NativeRedirector
from tonnage.virtual.redirect.scratch import ScratchFolder, summary
from tonnage.virtual.redirect.settings import (
    folders_in_place,
    folders_of_compiled_modules,
    offline_environment,
)


class Redirector(Protocol):
    """What redirects this process: the native library, or the functions of Python."""

    def variables(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables that redirect children."""

    def begin(self, scratch: Path) -> None:
        """Redirect into this folder, which is prepared; an OSError says that it cannot be used."""

    def pause(self) -> AbstractContextManager[None]:
        """Let this thread read and write in place."""

    def end(self) -> None:
        """Write in place again."""


class Redirection:
    """A context in which whatever is written goes to a scratch folder.

    At its end the files are discarded, or moved to the folder `keep`. With `in_place` nothing is redirected. Inside
    another redirection it does nothing: what is written is the outer one's.
    """

    def __init__(
        self,
        *,
        keep: Path | None = None,
        in_place: bool = False,
        redirector: Redirector | None = None,
    ) -> None:
        self.writes: ScriptWrites | None = None  # known at the end
        self._keep = check_keep(keep, in_place)
        self._in_place = in_place
        self._through: list[str] = []
        self._folder = Path.cwd()
        self._scratch: ScratchFolder | None = None
        self._saved_environment: dict[str, str | None] = {}
        self._redirector = redirector or _redirector_of_platform()

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
        if os.environ.get(VARIABLE) or _is_redirected_in_python():
            return
        self._folder = Path(os.path.realpath(Path.cwd()))
        scratch = ScratchFolder()
        scratch.prepare([*folders_in_place(os.environ), *self._through], folders_of_compiled_modules())
        try:
            self._set_environment(scratch)
            self._redirector.begin(scratch.path)
        except (OSError, TonnageError) as error:
            self._restore_environment()
            scratch.remove()
            if isinstance(error, TonnageError):
                raise
            raise RequestError(
                f"The scratch folder {scratch.path} cannot be used to keep the script's writes: {error}.",
                hint="Name another place for it with TMPDIR, or let the script write in place with --write.",
            ) from error
        self._scratch = scratch

    def pause(self) -> AbstractContextManager[None]:
        """Let this thread read and write in place."""
        return self._redirector.pause()

    def write_through(self, folder: str | Path) -> None:
        """Let what is written to this folder be written in place; call it before the beginning."""
        self._through.append(os.path.realpath(folder))

    def empty(self) -> None:
        """Forget what was written so far: the script begins again."""
        if self._scratch is not None:
            with self._redirector.pause():
                self._scratch.empty()

    def end(self) -> None:
        """Write in place again; list what was written, and keep or discard it."""
        if self._scratch is None:
            return
        scratch, self._scratch = self._scratch, None
        self._redirector.end()
        self._restore_environment()
        writes = summary(scratch.changes(self._folder), MOST_FILES)
        if self._keep is not None:
            scratch.keep(self._keep, self._folder)
            writes = replace(writes, fate="kept", kept_in=str(self._keep))
        self.writes = writes
        scratch.remove()

    def _set_environment(self, scratch: ScratchFolder) -> None:
        variables = {
            **offline_environment(scratch.path),
            **self._redirector.variables(scratch.path),
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


def _redirector_of_platform() -> Redirector:
    if sys.platform == "linux":
        return NativeRedirector()
    # Imported where it is used: it is large, and a script waits.
    from tonnage.virtual.redirect.python_level import PythonRedirector

    return PythonRedirector()


def _is_redirected_in_python() -> bool:
    module = sys.modules.get("tonnage.virtual.redirect.python_level")
    return module is not None and module.PythonRedirector.active is not None

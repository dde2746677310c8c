"""The `tonnage` command. Errors become words here and nowhere else; no work is done here."""

import atexit
import errno
import os
import sys
import threading
from importlib import import_module
from typing import NoReturn

from tonnage.errors import TonnageError
from tonnage.untrusted import clipped


def main() -> NoReturn:
    """Run a command and exit.

    0: it fits or worked, 1: it does not fit, 2: the request was wrong, 3: the run depends on values that a prediction does
    not have, 130: it was interrupted.
    """
    from tonnage.report.streams import use_look_alikes

    # Open to nowhere what the caller closed (`>&-`): Python has no stream there, and the next file would get its number.
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _to_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w"))
    use_look_alikes(sys.stdout, sys.stderr)
    try:
        status = _status()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough. Python flushes once more at its end: to nowhere.
        _to_nowhere(1)
        status = 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"tonnage: the output cannot be written: {error.strerror}", file=sys.stderr)
        _to_nowhere(1)
        status = 2
    sys.exit(status)


def _to_nowhere(number: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _status() -> str | int | None:
    """The exit status of the command, after it is said what was wrong with it."""
    try:
        return _run(sys.argv[1:])
    except TonnageError as error:
        print(f"tonnage: {clipped(error.words)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tonnage: interrupted", file=sys.stderr)
        return 130  # as a shell has it: 128 and the number of the signal
    except SystemExit as leaving:
        # Typer turns a reader that left into exit status 1.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        return leaving.code


def _run(words: list[str]) -> int | None:
    for name in ("run", "certify", "record", "serve"):
        if words[:1] == [name]:
            leave(import_module(f"tonnage.commands.{name}").command(words[1:]))
    for name in ("train", "serve", "rl"):
        if words[:2] == ["plan", name]:
            return import_module(f"tonnage.commands.plan_{name}").command(words[2:])  # type: ignore[no-any-return]
    from tonnage.commands.app import app

    app()
    return None


def leave(status: int) -> NoReturn:
    """Exit without taking the process apart: that takes a second and a half after torch and transformers.

    What a script may rely on still happens: its threads end, its exit handlers run, its output is flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)

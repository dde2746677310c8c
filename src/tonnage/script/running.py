"""Runs a program as Python would, with its own output, traceback and exit status."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tonnage.errors import TonnageError
from tonnage.recording.records import Outcome
from tonnage.script.program import Program

_NO_TRITON = (
    "A CPU build of torch comes without Triton. Install it (pip install triton): it imports without a GPU, and on a "
    "virtual one its kernels are counted and not run."
)
RUNNER = os.path.abspath(__file__)  # frames of this file and below started us, and are not the script's
_OWN = os.path.dirname(os.path.dirname(RUNNER)) + os.sep
_INTERRUPTED = "interrupted inside the virtual GPU"  # a KeyboardInterrupt that went through C++ (native/bridge.h)
_DEVICE = _OWN + "virtual" + os.sep
_SOON_S, _LONGEST_S = 0.005, 2.0


@dataclass(frozen=True)
class Ending:
    """How a script ended."""

    outcome: Outcome
    exit_status: int = 0
    error: str = ""


def run_as_main(
    program: Program | Path,
    arguments: list[str],
    torch: Any,
    around: AbstractContextManager[Any] | None = None,
    told_elsewhere: tuple[type[BaseException], ...] = (),
) -> Ending:
    """Run a program to its end, however it ends, inside `around`. Errors in `told_elsewhere` are not printed."""
    program = program if isinstance(program, Program) else Program.of_file(program)
    try:
        with program.as_main(arguments), around or nullcontext(), _interrupts_outside_the_device():
            program.run()
        return Ending("ok")
    except torch.OutOfMemoryError as error:
        _show(error)
        return Ending("oom", 1, str(error))
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return Ending("ok")
        if isinstance(error.code, int):
            return Ending("error", error.code, f"exit status {error.code}")
        print(error.code, file=sys.stderr)
        return Ending("error", 1, str(error.code))
    except KeyboardInterrupt:
        return Ending("error", 130, "interrupted")
    except BaseException as error:
        if _INTERRUPTED in str(error):
            return Ending("error", 130, "interrupted")
        if not isinstance(error, told_elsewhere):
            _show(error)
        # An out-of-memory error that caused this one: a pipeline's schedule, for example, wraps its stages' errors.
        shortage = error.__cause__
        while shortage is not None and not isinstance(shortage, torch.OutOfMemoryError):
            shortage = shortage.__cause__
        if shortage:
            return Ending("oom", 1, str(shortage))
        hint = getattr(error, "hint", "") if isinstance(error, TonnageError) else ""
        return Ending("error", 1, " ".join(filter(None, [f"{type(error).__name__}: {error}", hint])))
    finally:
        sys.stdout.flush()


@contextmanager
def _interrupts_outside_the_device() -> Iterator[None]:
    """Delay KeyboardInterrupt, for seconds at most, while the virtual GPU works: it would leave an event half recorded."""
    plain, since = signal.getsignal(signal.SIGINT), 0.0
    if plain is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt_soon(number: int) -> None:
        # The signal goes to the main thread itself: one that the timer's thread gets does not wake it from a wait.
        main = threading.main_thread().ident or 0
        threading.Timer(_SOON_S, signal.pthread_kill, (main, number)).start()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since
        since = since or time.monotonic()
        while frame is not None and frame.f_code.co_filename != RUNNER:
            if frame.f_code.co_filename.startswith(_DEVICE) and time.monotonic() < since + _LONGEST_S:
                interrupt_soon(number)
                return
            frame = frame.f_back
        since = 0.0
        signal.default_int_handler(number, frame)

    def tell(problem: "sys.UnraisableHookArgs") -> None:
        """Raise an interrupt again that hit a finalizer, where Python would drop it."""
        if issubclass(problem.exc_type, KeyboardInterrupt):
            interrupt_soon(signal.SIGINT)
        else:
            told_by(problem)

    told_by = sys.unraisablehook
    signal.signal(signal.SIGINT, handle)
    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = told_by
        signal.signal(signal.SIGINT, plain)


def _show(error: BaseException) -> None:
    """Print the traceback as Python would, without our own frames and those that ran the script."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not is_ours(frame.filename)])
        part = part.__cause__ or part.__context__
    sys.stderr.write("".join(shown.format()))
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        print(_NO_TRITON, file=sys.stderr)


def is_ours(path: str) -> bool:
    """Whether frames of this file are ours or runpy's, not the script's."""
    return path.startswith(_OWN) or path == "<frozen runpy>" or os.path.basename(path) == "runpy.py"

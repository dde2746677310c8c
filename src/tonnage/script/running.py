"""Runs a script as `python script.py` would, and keeps its own output, traceback and exit status."""

import os
import runpy
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.recording.records import Outcome


@dataclass(frozen=True)
class Ending:
    """How a script ended."""

    outcome: Outcome
    exit_status: int = 0
    error: str = ""


def run_as_main(
    script: Path, arguments: list[str], torch: Any, around: AbstractContextManager[Any] | None = None
) -> Ending:
    """Run it to its end, whatever that is; `around` is entered for its time."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with around or nullcontext():
            runpy.run_path(str(script), run_name="__main__")
        return Ending("ok")
    except torch.OutOfMemoryError as error:
        _show(error)
        return Ending("oom", 1, str(error))
    except SystemExit as error:
        return _exited(error.code)
    except KeyboardInterrupt:
        return Ending("error", 130, "interrupted")
    except BaseException as error:
        _show(error)
        return Ending("error", 1, f"{type(error).__name__}: {error}")
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
        sys.stdout.flush()


def _exited(code: object) -> Ending:
    if code is None or code == 0:
        return Ending("ok")
    if isinstance(code, int):
        return Ending("error", code, f"exit status {code}")
    print(code, file=sys.stderr)
    return Ending("error", 1, str(code))


def _show(error: BaseException) -> None:
    """The traceback as Python would print it, without our own frames at its top."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    trace = error.__traceback__
    while trace and (trace.tb_frame.f_code.co_filename.startswith(own) or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)

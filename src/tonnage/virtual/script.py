"""Runs a script as `python script.py` would, on a virtual GPU, and keeps its own output, traceback and exit status."""

import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.hardware import Gpu
from tonnage.recording import Recording
from tonnage.recording.records import Outcome
from tonnage.virtual.device import Device
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.session import Session


@dataclass(frozen=True)
class _Ending:
    outcome: Outcome
    exit_status: int = 0
    error: str = ""


def run_script(
    script: Path, arguments: list[str], *, gpu: Gpu, torch_version: str | None = None, progress: Any = None
) -> Recording:
    """Run the script to its end, whatever that is, and return what was recorded."""
    session = Session(gpu, torch_version)
    session.open()
    if progress is not None:
        session.device.on_progress = lambda: _tell(progress, session.device)
    try:
        ending = _run(script, arguments, session.torch)
    finally:
        session.close()
    recording = session.recording(
        outcome=ending.outcome, script=str(script), arguments=tuple(arguments), exit_status=ending.exit_status,
        error=ending.error, ooms_caught=len(session.device.ooms) - (ending.outcome == "oom"),
    )  # fmt: skip
    if ending.outcome == "oom" and session.device.ooms:
        recording.oom = session.device.ooms[-1]
    return recording


def _tell(progress: Any, device: Device) -> None:
    who = device.attribution
    peak = device.allocator.memory_stats()["allocated_bytes.all.peak"]
    progress.update(step=who.step, phase=who.phase, module=who.module_of(-1), peak_bytes=peak)


def _run(script: Path, arguments: list[str], torch: Any) -> _Ending:
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with quick_imports():
            runpy.run_path(str(script), run_name="__main__")
        return _Ending("ok")
    except torch.OutOfMemoryError as error:
        _show(error)
        return _Ending("oom", 1, str(error))
    except SystemExit as error:
        return _exited(error.code)
    except KeyboardInterrupt:
        return _Ending("error", 130, "interrupted")
    except BaseException as error:
        _show(error)
        return _Ending("error", 1, f"{type(error).__name__}: {error}")
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
        sys.stdout.flush()


def _exited(code: object) -> _Ending:
    if code is None or code == 0:
        return _Ending("ok")
    if isinstance(code, int):
        return _Ending("error", code, f"exit status {code}")
    print(code, file=sys.stderr)
    return _Ending("error", 1, str(code))


def _show(error: BaseException) -> None:
    """The traceback as Python would print it, without our own frames at its top."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    trace = error.__traceback__
    while trace and (trace.tb_frame.f_code.co_filename.startswith(own) or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)

"""Run one Tonnage command in a separate process, so that its output does not reach the protocol's stream.

If the caller stops waiting, the process and its children are terminated. Figures are read from the file that `--json`
wrote, errors from standard error.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from tonnage.report.progress import PROGRESS_FILE

_TELL_EVERY_S = 1.0
_TO_REPORT_S = 60.0  # time for an interrupted run to report how far it got
_TO_END_S = 2.0
_WORDS_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last)"
_MOST_WORDS = 1500  # characters
_OWN_LINE = re.compile(r"^tonnage[\w ]*: (?:error: )?", re.MULTILINE)

Tell = Callable[[float, str], Awaitable[None]]
_running: set[int] = set()


@dataclass(frozen=True)
class Ended:
    """How a command ended; without figures if the request was invalid."""

    status: int
    figures: dict[str, Any] | None
    words: str
    timed_out: bool = False


async def run_command(
    words: Sequence[str], *, folder: Path, figures: Path, tell: Tell, limit_s: float | None = None
) -> Ended:
    """Run `tonnage WORDS` in a folder, report its progress, and read what it wrote."""
    errors, progress = figures.with_suffix(".log"), figures.with_suffix(".progress")
    settings = {PROGRESS_FILE: str(progress), "COLUMNS": "80", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    with errors.open("wb") as stderr:
        process = await anyio.open_process(
            [sys.executable, "-m", "tonnage", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
            cwd=folder, env=os.environ | settings, start_new_session=True,
        )  # fmt: skip
    _running.add(process.pid)
    try:
        with anyio.move_on_after(limit_s) as scope:
            await _wait(process, progress, tell)
        if scope.cancelled_caught:
            process.send_signal(signal.SIGINT)
            with anyio.move_on_after(_TO_REPORT_S):
                await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
        _running.discard(process.pid)
    status = process.returncode if process.returncode is not None else -1
    read: Any = None
    with suppress(OSError, ValueError):
        read = json.loads(figures.read_bytes())
    return Ended(status, read if isinstance(read, dict) else None, _words(errors), scope.cancelled_caught)


def end_all() -> None:
    """Kill everything that is still running."""
    for pid in _running:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


async def _wait(process: Process, progress: Path, tell: Tell) -> None:
    start_s = anyio.current_time()
    while True:
        with anyio.move_on_after(_TELL_EVERY_S):
            await process.wait()
            return
        with suppress(OSError):
            await tell(anyio.current_time() - start_s, progress.read_text() if progress.exists() else "working")


async def _end(process: Process) -> None:
    """Ask the process and its children to end, then kill them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with anyio.move_on_after(_TO_END_S):
        await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _words(errors: Path) -> str:
    """Return Tonnage's last error without the usage before it, else the last lines of standard error."""
    with errors.open("rb") as file:
        file.seek(max(0, errors.stat().st_size - _WORDS_BYTES))
        text = file.read().decode(errors="replace").strip()
    own, lines = list(_OWN_LINE.finditer(text)), text.splitlines()
    if own:
        return text[own[-1].end() :][:_MOST_WORDS]
    if _TRACEBACK in text:
        return f"This is a fault of Tonnage's own: {lines[-1][:_MOST_WORDS]}\nWhat led to it is in {errors}."
    return "\n".join(lines[-8:])[-_MOST_WORDS:]

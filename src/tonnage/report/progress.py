"""A live line on the terminal while a script runs: step, phase, module, peak, a bar, the time.

    step 3  backward  layers.17.mlp   peak 92.4 GiB  ━━━━━━━━━━━━━━━━━━╸         0:04

It writes to standard error, and only to a terminal; or, where the environment names a file for it, its words to that file,
for a program that waits. Whatever the script prints goes first: the line is wiped before it
and stays away while the script is in the middle of a line of its own (a progress bar, say). It knows no recordings.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tonnage.report.lines import cut, report_width

PROGRESS_FILE = "TONNAGE_PROGRESS"
_INTERVAL_S = 0.1
_WIPE = "\r\x1b[2K"


class Progress:
    """The line. `update` is cheap enough to be called at every operator: it draws ten times a second at most."""

    def __init__(self, stream: TextIO, capacity_bytes: int) -> None:
        self._stream = stream
        self._capacity_bytes = capacity_bytes
        self._start_s = time.monotonic()
        self._next_s = self._start_s + _INTERVAL_S
        self._drawn = False
        self.script_mid_line = False

    def update(self, *, step: int, phase: str, module: str, peak_bytes: int) -> None:
        """Show where the script is, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s or self.script_mid_line:
            return
        self._next_s = now_s + _INTERVAL_S
        text = line(step, phase, module, peak_bytes, self._capacity_bytes, now_s - self._start_s)
        # A report may be wider than a very narrow terminal, but a line that wraps cannot be wiped.
        self._stream.write(f"{_WIPE}{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()
        self._drawn = True

    def wipe(self) -> None:
        """Leave the terminal as it was."""
        if self._drawn:
            self._stream.write(_WIPE)
            self._stream.flush()
            self._drawn = False


def line(step: int, phase: str, module: str, peak_bytes: int, capacity_bytes: int, elapsed_s: float) -> str:
    """The words of the line, one column less than the terminal has: in the last one it would wrap."""
    where = f"  step {step}  {phase:<9}" if step else f"  {phase or 'starting':<17}"
    minutes, seconds = divmod(int(elapsed_s), 60)
    peak = f"peak {peak_bytes / 2**30:.1f} GiB"
    width = report_width() - 1
    # Of a wider line the module and the bar share what is more.
    cells = max(6, 16 + (width - 79) // 2)
    left, right = f"{where}  {cut(module, cells):<{cells}}  {peak:<14}  ", f"  {minutes}:{seconds:02d}"
    room = width - len(left) - len(right)
    halves = min(2 * room, round(2 * room * (peak_bytes / capacity_bytes)))
    return left + ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(room) + right


class ProgressFile:
    """The same for a program: one sentence, in a file that is written anew twice a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_s = 0.0

    def update(self, *, step: int, phase: str, module: str, peak_bytes: int) -> None:
        """Say where the script is, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + 5 * _INTERVAL_S
        where = f"step {step}, {phase}" if step else phase or "starting"
        with suppress(OSError):
            self._path.write_text(f"{where}, peak {peak_bytes / 2**30:.1f} GiB")


class _Watched:
    """A text stream that gives the script's words precedence over the line; otherwise the stream itself."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress

    def write(self, text: str) -> int:
        self._progress.wipe()
        if text:
            self._progress.script_mid_line = not text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def live_progress(capacity_bytes: int) -> Iterator[Progress | ProgressFile | None]:
    """A line while the block runs; None where standard error is no terminal."""
    stdout, stderr = sys.stdout, sys.stderr
    if os.environ.get(PROGRESS_FILE):
        yield ProgressFile(Path(os.environ[PROGRESS_FILE]))
        return
    if not stderr.isatty():
        yield None
        return
    progress = Progress(stderr, capacity_bytes)
    sys.stderr = _Watched(stderr, progress)
    if stdout.isatty():
        sys.stdout = _Watched(stdout, progress)
    try:
        yield progress
    finally:
        progress.wipe()
        sys.stdout, sys.stderr = stdout, stderr

"""A live progress line on the terminal while a script runs: step, phase, module, peak, a bar, the time.

    step 3  backward  layers.17.mlp   peak 92.4 GiB  ━━━━━━━━━━━━━━━━━━╸         0:04

It writes to standard error if that is a terminal, or to a file that the environment names, for a waiting program. The
script's own output takes precedence: the line is cleared before it, and stays away while the script is in the middle of
a line (such as a progress bar).
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
    """The progress line. `update` is cheap enough to call at every operator: it draws at most ten times a second."""

    def __init__(self, stream: TextIO, capacity_bytes: int) -> None:
        self._stream = stream
        self._capacity_bytes = capacity_bytes
        self._start_s = time.monotonic()
        self._next_s = self._start_s + _INTERVAL_S
        self._drawn = False
        self.script_mid_line = False

    def update(self, *, step: int, phase: str, module: str, peak_bytes: int) -> None:
        """Show where the script is, if it is time to redraw."""
        now_s = time.monotonic()
        if now_s < self._next_s or self.script_mid_line:
            return
        self._next_s = now_s + _INTERVAL_S
        text = line(step, phase, module, peak_bytes, self._capacity_bytes, now_s - self._start_s)
        # A line that wraps on a very narrow terminal cannot be cleared.
        self._stream.write(f"{_WIPE}{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()
        self._drawn = True

    def wipe(self) -> None:
        """Clear the line."""
        if self._drawn:
            self._stream.write(_WIPE)
            self._stream.flush()
            self._drawn = False


def line(step: int, phase: str, module: str, peak_bytes: int, capacity_bytes: int, elapsed_s: float) -> str:
    """Return the line's text, one column narrower than the terminal, so that it does not wrap."""
    where = f"  step {step}  {phase:<9}" if step else f"  {phase or 'starting':<17}"
    minutes, seconds = divmod(int(elapsed_s), 60)
    peak = f"peak {peak_bytes / 2**30:.1f} GiB"
    width = report_width() - 1
    # On a wider line the module and the bar share the extra room.
    cells = max(6, 16 + (width - 79) // 2)
    left, right = f"{where}  {cut(module, cells):<{cells}}  {peak:<14}  ", f"  {minutes}:{seconds:02d}"
    room = width - len(left) - len(right)
    halves = min(2 * room, round(2 * room * (peak_bytes / capacity_bytes)))
    return left + ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(room) + right


class ProgressFile:
    """The same for a program: one sentence in a file, rewritten at most twice a second.

    The file is opened before the script runs, whose own files go elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._next_s = 0.0

    def update(self, *, step: int, phase: str, module: str, peak_bytes: int) -> None:
        """Write where the script is, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + 5 * _INTERVAL_S
        where = f"step {step}, {phase}" if step else phase or "starting"
        with suppress(OSError):
            self._file.seek(0)
            self._file.write(f"{where}, peak {peak_bytes / 2**30:.1f} GiB")
            self._file.truncate()
            self._file.flush()


class _Watched:
    """A text stream wrapper that clears the line before the script writes."""

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
    """Show a progress line while the block runs; yields None if standard error is not a terminal."""
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

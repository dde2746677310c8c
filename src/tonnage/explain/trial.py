"""Run a change instead of computing it: a virtual run's script again, with a flag or setting changed.

A computed saving takes a recording's events as given; a run does not. Only changes that need no edit of the script are
tried: its own flags, or allocator settings. The run is a separate process on the same virtual GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tonnage.explain.fixes import Fix
from tonnage.recording import Recording
from tonnage.recording.replay import demand

_SETTINGS = re.compile(r"(PYTORCH_(?:CUDA_)?ALLOC_CONF)=(.*)")
_COMMAND = (sys.executable, "-c", "from tonnage.commands.main import main; main()")
_PATIENCE_S = 60


class ScriptChange(NamedTuple):
    """The script's arguments, and additions to its environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def tried(recording: Recording, fixes: Sequence[Fix], say: Callable[[str], None] = lambda _: None) -> tuple[Fix, ...]:
    """Return the fixes, measured if they could be run; `say` is told what runs."""
    if recording.header.source != "virtual" or not Path(recording.header.script).is_file():
        return tuple(fixes)
    after = list(fixes)
    for number, fix in enumerate(fixes):
        if change := change_of(fix, recording.header.arguments):
            say(f"running it with {fix.how} ...")
            after[number] = _measured(recording, fix, _run(recording, change))
    return tuple(after)


def change_of(fix: Fix, arguments: Sequence[str]) -> ScriptChange | None:
    """Return how to run it; None if the change edits the script."""
    if setting := _SETTINGS.fullmatch(fix.how):
        return ScriptChange(tuple(arguments), {setting[1]: setting[2]})
    flag, separator, value = fix.how.partition("=" if "=" in fix.how else " ")
    if not flag.startswith("--") or not value.isdigit():
        return None
    if separator == "=":
        words = [fix.how if word.startswith(f"{flag}=") else word for word in arguments]
    else:
        place = list(arguments).index(flag) + 1
        words = [*arguments[:place], value, *arguments[place + 1 :]]
    return ScriptChange(tuple(words), {})


def _run(recording: Recording, change: ScriptChange) -> dict[str, Any] | None:
    """Return the run's figures; None if it failed."""
    header = recording.header
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = ["run", "--gpu", header.gpu, "--torch", header.torch_modelled, "--json", str(answer)]
        words += header.command or [header.script]
        try:
            subprocess.run(
                [*_COMMAND, *words, *change.arguments], capture_output=True, check=False,
                cwd=header.folder or None,
                env={**os.environ, **change.environment}, timeout=_PATIENCE_S + 10 * header.wall_seconds,
            )  # fmt: skip
            figures: dict[str, Any] = json.loads(answer.read_text())
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return None
    return figures if figures.get("outcome") in ("ok", "oom") else None


def _measured(recording: Recording, fix: Fix, figures: dict[str, Any] | None) -> Fix:
    if figures is None:
        return fix
    died = recording.header.outcome == "oom"
    is_setting = _SETTINGS.fullmatch(fix.how) is not None
    if figures["outcome"] == "oom":
        # A run that failed went on, and reports what it would have needed.
        total = None if is_setting or recording.whole is None else figures.get("total")
        peak = total["peak_allocated_bytes"] if total else demand(recording).peak_allocated_bytes - fix.saves_bytes
        saved = max(0, demand(recording).peak_allocated_bytes - peak)
        return replace(fix, saves_bytes=saved, rescues=False if died else fix.rescues, was_run=True)
    before = recording.peak_reserved_bytes if is_setting else demand(recording).peak_allocated_bytes
    now = figures["peak_reserved_bytes"] if is_setting else figures["peak_allocated_bytes"]
    return replace(fix, saves_bytes=max(0, before - now), rescues=True if died else None, was_run=True)

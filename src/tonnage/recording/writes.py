"""Files that a script wrote, changed or deleted during a virtual run, and what became of them."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from tonnage.recording.layout import record_of
from tonnage.units import format_bytes

Change = Literal["new", "changed", "deleted"]
Fate = Literal["discarded", "kept", "in place"]
WRITES_KEY = "writes"  # key in the header's table
MOST_FILES = 1000
ON_COMMAND_LINE = "use --keep DIR to keep them"
IN_PYTHON = "use virtual_gpu(..., keep=DIR) to keep them"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as the script left it; `size_bytes` is what it would take on the user's disk."""

    path: str
    size_bytes: int
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptWrites:
    """What a script wrote. `files` are the largest ones first, at most `MOST_FILES`; the totals are of all."""

    fate: Fate = "discarded"
    kept_in: str = ""
    written_count: int = 0
    written_bytes: int = 0
    deleted_count: int = 0
    files: tuple[WrittenFile, ...] = ()


def script_writes(values: Any) -> ScriptWrites:
    """Validate and convert what a file says."""

    def files(rows: list[Any]) -> tuple[WrittenFile, ...]:
        if len(rows) > MOST_FILES:
            raise ValueError(f"it lists {len(rows)} written files")
        return tuple(record_of(WrittenFile, row, "written file") for row in rows)

    return record_of(ScriptWrites, values, "written files", files=files)


def writes_sentence(writes: ScriptWrites, advice: str = ON_COMMAND_LINE, folder: str = "") -> str:
    """Return "3 files written, 14.2 GiB (checkpoint-10/…): discarded; use --keep DIR to keep them"."""
    if writes.fate == "in place":
        return "the script wrote its files in place (--write), with values of the virtual GPU in them"
    parts = []
    if writes.written_count:
        files = "1 file" if writes.written_count == 1 else f"{writes.written_count} files"
        parts.append(f"{files} written, {format_bytes(writes.written_bytes)} ({_example(writes, folder)})")
    if writes.deleted_count:
        parts.append(f"{writes.deleted_count} deleted")
    if writes.fate == "kept":
        return f"{', '.join(parts)}: kept in {writes.kept_in}"
    return f"{', '.join(parts)}: discarded; {advice}"


def path_in(folder: str, path: str) -> str:
    """Return the path relative to the folder, if it is inside."""
    return path.removeprefix(f"{folder.rstrip('/')}/") if folder else path


def _example(writes: ScriptWrites, folder: str) -> str:
    """Return the largest file, or the folder that it shares with others."""
    written = [file.path for file in writes.files if file.change != "deleted"]
    path = written[0]
    shown = path_in(folder, path)
    if writes.written_count == 1:
        return shown
    parent = os.path.dirname(shown)
    return f"{parent}/…" if parent else f"{shown}, …"

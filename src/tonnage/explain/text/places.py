"""Where in a program memory ran out: the traceback's frames, the phase, the operator, the user's own line.

It reads Python's tracebacks, rich's boxes and IPython's, and knows the settings of common frameworks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tonnage.explain.text.log import table

_FRAMES = (
    re.compile(r'File "(?P<file>[^"]{1,400})", line (?P<line>\d+), in (?P<function>[\w.<>]+)'),
    re.compile(r"[│|] (?P<file>\S{1,300}\.py):(?P<line>\d+) in (?P<function>[\w.<>]*)"),
    re.compile(r"File (?P<file>\S{1,300}\.py):(?P<line>\d+), in (?P<function>[\w.<>]+)\("),
    re.compile(r"^\[?(?P<file>[^\s:\]]{1,300}\.py)\]?(?:\(https?://[^\s)]+\))? in (?P<function>[\w<>.]+)\("),
)
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|importlib|runpy")
_NOT_CODE = re.compile(r"^[\s~^│|╭╮╰╯─-]*$|^\s*File |^Traceback|Error\b.*:|^\s*\[Previous line")
_MESSAGE = re.compile(r"Error\b.*(?:out of memory|Allocation on device)", re.IGNORECASE)
_TRAINS = re.compile(
    r":train\b|:fit\b|trainer\w*\.py|train\w*\.py|:_?inner_training_loop|:training_step|:run_epoch", re.IGNORECASE
)
_STEPS = re.compile(r"(?<!\d)(\d{1,9})/(\d{1,9}) \[\d|\b(?:step|iter(?:ation)?)s?[ =:\[]+(\d{1,9})\b", re.IGNORECASE)
# Progress bars that do not count steps.
_OTHER_BARS = re.compile(r"load|fetch|shard|component|^map|filter|token|generating|pulling", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TracebackFrame:
    """One call of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def words(self) -> str:
        """The text that patterns match; paths use slashes."""
        return f"{self.file}:{self.function} {self.code}"


@dataclass(frozen=True, slots=True)
class FailedOperator:
    """What the innermost informative frame was doing, and the cause that this implies."""

    name: str
    cause: str
    says: str
    steps: list[str]
    least_share: float


@dataclass(frozen=True, slots=True)
class FailurePlace:
    """Where it failed, as far as the text says."""

    frames: tuple[TracebackFrame, ...]
    phase: str
    operator: FailedOperator | None
    steps: int | None

    @property
    def is_training(self) -> bool:
        """Whether a frame of a training loop is in the traceback."""
        return any(_TRAINS.search(frame.words) for frame in self.frames)

    @property
    def own_frame(self) -> TracebackFrame | None:
        """The innermost frame outside libraries, else outside PyTorch, else the innermost."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)]
        outer = [frame for frame in self.frames if "/torch/" not in f"/{frame.file}"]
        return (own or outer or list(self.frames))[-1] if self.frames else None


def place_of(lines: Sequence[str]) -> FailurePlace:
    """Read the last traceback of a text."""
    frames = _frames(lines)
    words = [frame.words for frame in frames]
    # From the inside out: a softmax says more than the loop around it.
    inner = next((row for text in reversed(words) for pattern, row in _rows("operators") if pattern.search(text)), None)
    operator = None
    if inner:
        known = (inner["name"], inner["cause"], inner["says"], inner["steps"])
        operator = FailedOperator(*known, inner.get("least_share", 0.0))
    phase = next((row["name"] for pattern, row in _rows("phases") if any(map(pattern.search, words))), "")
    counted = [line[-400:] for line in lines if not _OTHER_BARS.search(line)]
    counts = [int(next(filter(None, groups), 0)) for line in counted for groups in _STEPS.findall(line)[:3]]
    return FailurePlace(tuple(frames), phase, operator, max(counts, default=None))


def _frames(lines: Sequence[str]) -> list[TracebackFrame]:
    """Return the frames of the traceback that ends in the first such message, else of the last one, outermost first."""
    frames: list[TracebackFrame] = []
    for place, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            frames.clear()
        elif frames and _MESSAGE.search(line):
            break  # what follows are exceptions that this one caused, or other ranks
        match = next((m for pattern in _FRAMES if (m := pattern.search(line))), None)
        if match is None:
            continue
        found = match.groupdict()
        after = lines[place + 1 : place + 2]
        code = after[0].strip() if after and not _NOT_CODE.search(after[0]) else ""
        file, number = found["file"].replace("\\", "/"), int((found.get("line") or "0")[:9])
        frames.append(TracebackFrame(file, number, found["function"], code[:200]))
    # An editor's debugger shows the message first, and the innermost frame below it.
    return frames[::-1] if any(line.startswith("Exception has occurred") for line in lines) else frames


def framework_words(text: str) -> dict[str, Any]:
    """Return the texts for the framework that a text names, else PyTorch's."""
    rows = table("frameworks")["frameworks"]
    found: dict[str, Any] = next(row for row in rows if not row["mark"] or re.search(row["mark"], text))
    return found


def steps_of(cause: str) -> list[str]:
    """Return what to do about a cause, from the first place that implies it."""
    steps: list[str] = next(row["steps"] for _, row in _rows("operators") if row["cause"] == cause)
    return steps


@cache
def _rows(kind: str) -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(row["pattern"]), row) for row in table("places")[kind]]

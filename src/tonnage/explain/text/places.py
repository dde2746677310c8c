"""Where in a program memory ran out: the traceback's frames, the phase, the operator, the user's own line.

It reads Python's tracebacks, rich's boxes and IPython's, and knows the settings of common frameworks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tonnage.explain.text.tables import Framework, OperatorRow, frameworks, operators, phases

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
_WINDOWS_PATH = re.compile(r"[A-Za-z]:/")
# A call of the closure, or a function that is one.
_CLOSURE = re.compile(r":(?:optimizer_)?closure\b|:_wrap_closure\b|= closure\(\)$")
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
class FailurePlace:
    """Where it failed, as far as the text says."""

    frames: tuple[TracebackFrame, ...]
    phase: str
    operator: OperatorRow | None
    steps: int | None

    @property
    def is_training(self) -> bool:
        """Whether a frame of a training loop is in the traceback."""
        return any(_TRAINS.search(frame.words) for frame in self.frames)

    @property
    def system(self) -> str:
        """The system that the paths of the traceback are of: "Windows", "POSIX", or empty if they do not say."""
        if any(_WINDOWS_PATH.match(frame.file) for frame in self.frames):
            return "Windows"
        return "POSIX" if any(frame.file.startswith("/") for frame in self.frames) else ""

    @property
    def own_frame(self) -> TracebackFrame | None:
        """The innermost frame outside libraries, else outside PyTorch, else the innermost."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)]
        outer = [frame for frame in self.frames if "/torch/" not in f"/{frame.file}"]
        return (own or outer or list(self.frames))[-1] if self.frames else None


def place_of(lines: Sequence[str]) -> FailurePlace:
    """Read the last traceback of a text."""
    frames = _frames(lines)
    words = [frame.words for frame in _within_closure(frames)]
    # From the inside out: a softmax says more than the loop around it.
    rows = (row for text in reversed(words) for row in operators() if row.pattern.search(text))
    operator = next(rows, None)
    phase = next((row.name for row in phases() if any(map(row.pattern.search, words))), "")
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


def _within_closure(frames: list[TracebackFrame]) -> list[TracebackFrame]:
    """Return the frames inside the closure that an optimizer's step calls, as Lightning's does, else all frames.

    The step around a closure has not begun: forward and backward run within it.
    """
    calls = [place for place, frame in enumerate(frames) if _CLOSURE.search(frame.words)]
    inner_frames = frames[calls[-1] + 1 :] if calls else []
    return inner_frames or frames


def framework_of(text: str) -> Framework:
    """Return the framework that a text names, else PyTorch."""
    return next(row for row in frameworks() if row.mark.search(text))


def steps_of(cause: str) -> tuple[str, ...]:
    """Return what to do about a cause, from the first place that implies it."""
    return next(row.steps for row in operators() if row.cause == cause)

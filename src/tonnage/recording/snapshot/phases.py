"""Infers the phase and step of each event from stacks and profiler annotations.

A phase begins with the first event that shows it. Backward runs on threads without Python frames, so an event without
any is backward's, if other events have some. A step begins with the first forward after an optimizer step; in a trace
without an optimizer, with the first forward after a backward; with neither, with an iteration of the script's own
loop outside all modules.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

from tonnage.recording.loops import loop_starts
from tonnage.recording.records import Allocation, Mark
from tonnage.recording.snapshot.origins import Origin
from tonnage.recording.snapshot.schema import Annotation

_OPTIMIZER_MARK = "Optimizer.step"
_PASSING = ("backward", "optimizer")


class Guide(ABC):
    """Supplies the phase and step of each event in turn."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.step = 0
        self.stack: tuple[str, ...] = ()  # the stack that called backward
        self.marks: list[Mark] = []

    @property
    def line(self) -> str:
        """The script's line that called backward, while it runs."""
        return self.stack[0] if self.stack else ""

    @abstractmethod
    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Advance to the next event, which has this origin."""


class Phases(Guide):
    """Follows the events; `phase` and `step` are the current ones."""

    def __init__(self, origins: Sequence[Origin], annotations: Sequence[Annotation]) -> None:
        super().__init__("setup" if any(origin.line for origin in origins) else "")
        self._knows_stacks = bool(self.phase)
        self._ahead = [a for a in annotations if a.name.startswith(_OPTIMIZER_MARK)][::-1]
        self._shows_optimizer = bool(self._ahead) or any(origin.about == "optimizer" for origin in origins)
        self._step_is_over = True

    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Advance to the next event, which has this origin."""
        while self._ahead and self._ahead[-1].time_us <= time_us:
            annotation = self._ahead.pop()
            if annotation.is_start:
                self._step_is_over = True
            if self._knows_stacks:
                self._enter("optimizer" if annotation.is_start else "other", sequence)
        about = origin.about
        if about == "optimizer":
            self._enter("optimizer", sequence)
            self._step_is_over = True
        elif about == "backward" or (about == "engine" and self._knows_stacks):
            self._enter("backward", sequence)
            self._step_is_over |= not self._shows_optimizer
            self.stack = origin.stack or self.stack
        elif about in ("forward", "cache"):
            if self._step_is_over:
                self._step_is_over = False
                self.step += 1
                self.marks.append(Mark(sequence, "step", str(self.step)))
            self._enter("forward", sequence)
        elif self.phase in _PASSING:
            self._enter("other", sequence)

    def _enter(self, phase: str, sequence: int) -> None:
        if phase != self.phase:
            self.phase = phase
            self.marks.append(Mark(sequence, "phase", phase))
            if phase != "backward":
                self.stack = ()


def mark_turns(allocations: Sequence[Allocation], origins: Sequence[Origin], marks: list[Mark]) -> None:
    """In a trace of forwards only, make each iteration of the script's loop a step. `origins` belong to the allocations."""
    steps = [mark for mark in marks if mark.kind == "step"]
    if len(steps) != 1 or any(mark.name in _PASSING for mark in marks):
        return
    stacks = [(a.born, origin.outside[::-1]) for a, origin in zip(allocations, origins, strict=True)]
    first = steps[0].sequence
    starts = [first, *(start for start in loop_starts(stacks, goes_deeper=True)[1:] if start > first)]
    marks.extend(Mark(start, "step", str(number)) for number, start in enumerate(starts[1:], start=2))
    for a in allocations:
        a.step = bisect_right(starts, a.born)

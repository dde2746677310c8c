"""Finds the iterations of a script's loop.

Marked steps are iterations, also in a snapshot, whose stacks tell which lines lie outside the model. Otherwise, with
too few steps (an inference loop, for example), an iteration begins where the outermost moving line of the script jumps
back, called from the same lines as before. A model's own loop over its layers jumps too, and what it leaves behind is
meant to stay until backward; so an inner line counts only in a successful run without backward whose iterations call
the same modules again.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from tonnage.recording.recording import Recording
from tonnage.recording.timeline import spans

ENOUGH = 3
_OF_TRAINING = ("backward", "optimizer")


def loop_starts(stacks: Sequence[tuple[int, tuple[str, ...]]], *, goes_deeper: bool) -> list[int]:
    """Return the first event of each iteration of the outermost loop with enough; stacks are (event, outermost first)."""
    stacks = [(born, stack) for born, stack in stacks if stack]
    depths = (max if goes_deeper else min)((len(stack) for _, stack in stacks), default=0)
    for depth in range(depths):
        lines = [(born, stack[: depth + 1]) for born, stack in stacks if len(stack) > depth]
        starts = [born for (_, before), (born, now) in pairwise(lines) if _is_back(before, now)]
        if len(starts) + 1 >= ENOUGH:
            return [lines[0][0], *starts]
        if not goes_deeper and len({stack[depth] for _, stack in lines}) > 1:
            return []
    return []


def _is_back(before: tuple[str, ...], now: tuple[str, ...]) -> bool:
    """Whether the innermost line is further up than before, in the same file and with the same callers."""
    (file_before, _, number_before), (file, _, number) = before[-1].rpartition(":"), now[-1].rpartition(":")
    if file != file_before or before[:-1] != now[:-1]:
        return False
    return number.isdigit() and number_before.isdigit() and int(number) < int(number_before)


def turns(recording: Recording) -> list[int]:
    """Return the first event of each iteration, in order; few if the script shows no loop."""
    length = len(recording.timeline.allocated_bytes)
    steps = [start for name, start, _ in spans(recording.marks, "step", length) if name not in ("", "0")]
    if len(steps) >= ENOUGH or recording.header.source == "snapshot":
        return steps
    is_inference = recording.oom is None and not any(mark.name in _OF_TRAINING for mark in recording.marks)
    starts = loop_starts([(a.born, a.stack[::-1]) for a in recording.allocations], goes_deeper=is_inference)
    # In a loop over layers every iteration calls modules that no other calls.
    by_turn: list[set[str]] = [set() for _ in range(len(starts) + 1)]
    for a in recording.allocations:
        if a.module and a.phase in ("forward", "generation", "evaluation"):
            by_turn[bisect_right(starts, a.born)].add(a.module)
    called = [modules for modules in by_turn[1:] if modules]
    is_over_layers = len(called) > 1 and sum(map(len, called)) == len(set().union(*called))
    return steps if not starts or is_over_layers else starts

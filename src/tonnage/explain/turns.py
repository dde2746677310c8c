"""Equal points of a script's loop: where each of its turns begins.

Steps that were marked are the turns. Where there are too few of them (a loop of inference in a snapshot, say), a turn
begins where a line of the script jumps back, as it does at the head of a loop: the outermost line that moves at all. A
model's own loop over its layers jumps too, and what it leaves behind is meant to stay until backward; so a line further
in counts only where a run ended well and never ran backward.
"""

from itertools import pairwise

from tonnage.recording import Allocation, Recording
from tonnage.recording.timeline import spans

ENOUGH = 3
_OF_TRAINING = ("backward", "optimizer")


def turns(recording: Recording) -> list[int]:
    """The first event of each turn, in order; few where the script shows no loop."""
    length = len(recording.timeline.allocated_bytes)
    steps = [start for name, start, _ in spans(recording.marks, "step", length) if name not in ("", "0")]
    if len(steps) >= ENOUGH:
        return steps
    is_inference = recording.oom is None and not any(mark.name in _OF_TRAINING for mark in recording.marks)
    return _jumps_back(recording.allocations, goes_deeper=is_inference) or steps


def _jumps_back(allocations: list[Allocation], *, goes_deeper: bool) -> list[int]:
    stacks = [(a.born, a.stack[::-1]) for a in allocations if a.stack]
    depths = min((len(stack) for _, stack in stacks), default=0)
    for depth in range(max((len(stack) for _, stack in stacks), default=0) if goes_deeper else depths):
        lines = [(born, stack[: depth + 1]) for born, stack in stacks if len(stack) > depth]
        starts = [born for (_, before), (born, now) in pairwise(lines) if _is_back(before, now)]
        if len(starts) + 1 >= ENOUGH:
            return [lines[0][0], *starts]
        if not goes_deeper and len({stack[depth] for _, stack in lines}) > 1:
            return []
    return []


def _is_back(before: tuple[str, ...], now: tuple[str, ...]) -> bool:
    """The innermost of these lines is further up than it was, in the same file and called from the same lines."""
    (file_before, _, number_before), (file, _, number) = before[-1].rpartition(":"), now[-1].rpartition(":")
    if file != file_before or before[:-1] != now[:-1]:
        return False
    return number.isdigit() and number_before.isdigit() and int(number) < int(number_before)

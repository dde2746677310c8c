"""Finds the iterations of a loop from the lines of stacks.

A line that jumps back, called from the same lines as before, starts the next iteration. The caller chooses which
lines count.
"""

from collections.abc import Sequence
from itertools import pairwise

ENOUGH = 3


def loop_starts(stacks: Sequence[tuple[int, tuple[str, ...]]], *, goes_deeper: bool) -> list[int]:
    """Return the first event of each iteration of the outermost loop with enough iterations.

    Stacks are (event, lines with the outermost first). Unless `goes_deeper`, a line that moves without a loop ends
    the search.
    """
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

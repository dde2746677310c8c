"""Where the turns of a loop begin, by the lines of stacks.

A line that jumps back, called from the same lines as before, is at the head of a loop again. Whose loop it is, the lines
do not say: whoever asks chooses which of them count.
"""

from collections.abc import Sequence
from itertools import pairwise

ENOUGH = 3


def loop_starts(stacks: Sequence[tuple[int, tuple[str, ...]]], *, goes_deeper: bool) -> list[int]:
    """The first event of each turn of the outermost loop of enough turns; the stacks are by event, outermost line first.

    Unless it `goes_deeper`, a line that moves without a loop ends the search.
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
    """The innermost of these lines is further up than it was, in the same file and called from the same lines."""
    (file_before, _, number_before), (file, _, number) = before[-1].rpartition(":"), now[-1].rpartition(":")
    if file != file_before or before[:-1] != now[:-1]:
        return False
    return number.isdigit() and number_before.isdigit() and int(number) < int(number_before)

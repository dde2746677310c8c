"""Equal points of a script's loop: where each of its iterations begins.

Marked steps are iterations, also in a snapshot, whose stacks tell which lines lie outside the model. Otherwise, with
too few steps (an inference loop, for example), an iteration begins where the outermost moving line of the script jumps
back. A model's own loop over its layers jumps too, and what it leaves behind is meant to stay until backward; so an
inner line counts only in a successful run without backward whose iterations call the same modules again.
"""

from bisect import bisect_right

from tonnage.recording import Recording
from tonnage.recording.loops import ENOUGH, loop_starts
from tonnage.recording.timeline import spans

__all__ = ["ENOUGH", "turns"]

_OF_TRAINING = ("backward", "optimizer")


def turns(recording: Recording) -> list[int]:
    """Return the first event of each iteration, in order; few if the script shows no loop."""
    length = len(recording.timeline.allocated_bytes)
    steps = [start for name, start, _ in spans(recording.marks, "step", length) if name not in ("", "0")]
    if len(steps) >= ENOUGH or recording.header.source == "snapshot":
        return steps
    is_inference = recording.oom is None and not any(mark.name in _OF_TRAINING for mark in recording.marks)
    stacks = [(a.born, a.stack[::-1]) for a in recording.allocations]
    starts = loop_starts(stacks, goes_deeper=is_inference)
    return steps if not starts or _is_loop_over_layers(recording, starts) else starts


def _is_loop_over_layers(recording: Recording, starts: list[int]) -> bool:
    """Say whether every iteration calls modules that no other calls."""
    by_turn: list[set[str]] = [set() for _ in range(len(starts) + 1)]
    for a in recording.allocations:
        if a.module and a.phase in ("forward", "generation", "evaluation"):
            by_turn[bisect_right(starts, a.born)].add(a.module)
    called = [modules for modules in by_turn[1:] if modules]
    return len(called) > 1 and sum(map(len, called)) == len(set().union(*called))

"""The outlook of a run that completed: memory that climbs, a cache that grows, lengths that may get longer.

A run climbs if every step leaves something behind, or if reserved memory grows at every step without more tensors. It
could not go on forever, so it does not simply fit. Growth with a natural end (a cache bounded by `generate`, the
longest batch of a data set) is only mentioned.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from tonnage.explain.case import Case
from tonnage.explain.causes.cache import growing_generation, unbounded_cache
from tonnage.explain.causes.data import checkpoint_held_twice, saving_on_gpu, waiting_batches
from tonnage.explain.causes.evaluation import graph_in_evaluation, kept_predictions, training_in_evaluation
from tonnage.explain.causes.leak import kept_blocks, kept_words, leak
from tonnage.explain.fixes import Climb, Outlook, allocator_fix
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.recording.timeline import spans
from tonnage.units import MIB, format_bytes

_OF_PHASES = (
    *(kept_predictions, graph_in_evaluation, training_in_evaluation),
    *(saving_on_gpu, checkpoint_held_twice, waiting_batches),
)
_OF_CACHES = (growing_generation, unbounded_cache)
_WORTH_SHARE = 0.1
_CREEP_STEPS = 8
_CREEP_SHARE = 0.02
_CREEP_BYTES = 32 * MIB
_EXPANDABLE = "expandable_segments:True"
_LENGTHS = 3


def outlook_of(recording: Recording) -> Outlook:
    """Return the outlook; empty for a failed run, whose cause says it all."""
    if recording.oom is not None or not recording.allocations:
        return Outlook()
    case = Case(recording)
    climbing = _leak(case) or _creep(case)
    found = filter(None, (rule(case) for rule in _OF_PHASES))
    least = _WORTH_SHARE * case.peak_bytes
    said = [finding for finding in found if finding.fixes and finding.fixes[0].saves_bytes >= least]
    caches = [finding for rule in _OF_CACHES if (finding := rule(case))][:1]
    lines = [*(finding.sentence for finding in (*said, *caches)), *_lengths(case)]
    fixes = [fix for finding in said for fix in finding.fixes]
    if climbing is None:
        return Outlook(tuple(lines), fixes=tuple(fixes))
    return replace(climbing, lines=(*climbing.lines, *lines))


def _leak(case: Case) -> Outlook | None:
    """Return what every step keeps, and the step in which that fills the card."""
    kept, finding = kept_blocks(case), leak(case)
    if kept is None or finding is None or finding.cause != "leak" or kept.in_cycle:
        return None
    # From the first to the last iteration that left something; not every one between need have.
    numbers = [bisect_right(case.turns, a.born) for a in kept.blocks]
    each = kept.size_bytes // (max(numbers) - min(numbers) + 1)
    # The first step that would not fit at constant growth; None if the card is unknown.
    header = case.recording.header
    room = header.capacity_bytes - header.overhead_bytes - case.recording.peak_reserved_bytes
    climb = Climb(each, len(case.turns) + max(0, room) // each + 1 if header.capacity_bytes and each else None)
    ahead = ""
    if climb.dies_at_step is not None and case.recording.begins_at:  # the number of earlier steps is unknown
        ahead = f": the card is full after about {climb.dies_at_step - len(case.turns):,} more"
    elif climb.dies_at_step is not None:
        ahead = f": it will die about step {climb.dies_at_step:,} on this card"
    words = f"the steps climb by {format_bytes(each)} each ({kept_words(case, kept)}){ahead}"
    return Outlook((words,), climb, finding.fixes)


def _creep(case: Case) -> Outlook | None:
    """Return reserved memory that keeps growing in the second half of the steps while tensors do not."""
    recording = case.recording
    timeline = recording.timeline
    stretches = spans(recording.marks, "step", len(timeline.allocated_bytes))
    steps = [(start, end) for name, start, end in stretches if name not in ("", "0")]
    if len(steps) < _CREEP_STEPS or _EXPANDABLE in recording.header.settings:
        return None
    allocated = [max(timeline.allocated_bytes[start:end]) for start, end in steps]
    reserved = [max(timeline.reserved_bytes[start:end]) for start, end in steps]
    half, last = len(steps) // 2, len(steps) - len(steps) // 4
    rose = [n for n in range(half, len(steps)) if reserved[n] > max(reserved[:n])]
    grew = reserved[-1] - max(reserved[:half])
    enough = max(_CREEP_SHARE * reserved[-1], _CREEP_BYTES)
    if len(rose) < 2 or rose[-1] < last or grew < enough or max(allocated[half:]) > max(allocated[:half]):
        return None
    fix = allocator_fix(recording, _EXPANDABLE)
    count = len(steps) - half
    words = f"reserved memory still climbs, {format_bytes(grew)} in the last {count} steps, though allocated memory does not"
    return Outlook((f"{words}: fragmentation",), Climb(grew // count, None), (fix,) if fix else ())


def _lengths(case: Case) -> Iterator[str]:
    """Yield the smallest and largest training batch, if they vary from step to step."""
    recording = case.recording
    if not any(mark.name == "backward" for mark in recording.marks):
        return
    largest: dict[int, tuple[int, tuple[int, ...]]] = {}
    for a in recording.allocations:
        if a.category is Category.INPUTS and a.shape and a.phase not in ("evaluation", "generation"):
            step = bisect_right(case.turns, a.born)
            largest[step] = max(largest.get(step, (0, ())), (a.requested_bytes, a.shape))
    shapes = sorted(largest.values())
    if len(set(shapes)) < _LENGTHS or len({len(shape) for _, shape in shapes}) > 1:
        return
    least, most = (" × ".join(f"{size:,}" for size in shape) for shape in (shapes[0][1], shapes[-1][1]))
    yield f"batches vary ({least} to {most}): the peak is that of the largest batch seen, and a larger one takes more"

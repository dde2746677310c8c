"""Why a run ran out of memory, or what is wrong with one that completed: a cause, the evidence, ranked fixes, an outlook.

A run failed because of whatever would have left room for the failed request; of several the largest is the cause, and
if there is none, the card was too small. A run that completed has a cause only if it could not go on forever (a leak,
an unbounded cache), if most of its memory is unused, or if its peak is in an evaluation, a checkpoint or waiting
batches and a tenth of it is avoidable. It climbs if every step leaves something behind, or if reserved memory grows at
every step without more tensors: then it does not simply fit. Growth with a natural end (a cache bounded by `generate`,
the longest batch of a data set) is only mentioned.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tonnage.explain.case import Case
from tonnage.explain.causes import RULES
from tonnage.explain.causes.growth import growing_generation, kept_blocks, kept_words, leak, unbounded_cache
from tonnage.explain.causes.phases import (
    checkpoint_held_twice,
    graph_in_evaluation,
    kept_predictions,
    saving_on_gpu,
    training_in_evaluation,
    waiting_batches,
)
from tonnage.explain.fixes import Advice, Cause, Climb, Finding, Fix, Outlook, advise, allocator_fix
from tonnage.explain.total import Total
from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, Recording
from tonnage.recording.timeline import spans
from tonnage.units import MIB, format_bytes

_WITHOUT_END = ("leak", "unbounded-cache")
_OF_RUNS_THAT_WENT_ON = ("fragmentation", "pinned-host", "host-memory")
_OF_PHASES = ("evaluation", "saving", "loading", "data")
_PHASE_SHARE = 0.1


_TITLES: dict[Cause, str] = {
    "capacity": "The card is too small for it",
    "fragmentation": "Fragmentation",
    "leak": "A leak",
    "outside": "Memory outside PyTorch",
    "other-process": "Another process",
    "pinned-host": "Pinned host memory",
    "host-memory": "The host's memory",
    "unbounded-cache": "A cache without a bound",
    "evaluation": "Evaluation holds too much",
    "generation": "Generation",
    "saving": "Saving takes room on the GPU",
    "loading": "A checkpoint is held twice",
    "data": "Batches wait on the GPU",
    "none": "Nothing is wrong",
}
_PHASE_RULES = (
    *(kept_predictions, graph_in_evaluation, training_in_evaluation),
    *(saving_on_gpu, checkpoint_held_twice, waiting_batches),
)
_CACHE_RULES = (growing_generation, unbounded_cache)
_WORTH_SHARE = 0.1
_CREEP_STEPS = 8
_CREEP_SHARE = 0.02
_CREEP_BYTES = 32 * MIB
_EXPANDABLE = "expandable_segments:True"
_LENGTHS = 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause as a word and a sentence, the findings, and the fixes, best first."""

    cause: Cause
    sentence: str
    evidence: tuple[Finding, ...]
    fixes: tuple[Fix, ...]
    larger_card: str | None = None
    total: Total | None = None


def diagnose(recording: Recording, cluster: ClusterSummary | None = None) -> Diagnosis:
    """Apply every rule, pick the cause, and collect all fixes; `cluster` adds its host's other ranks."""
    case = Case(recording, cluster)
    findings = [finding for rule in RULES if (finding := rule(case))]
    named = _named(case, findings)
    findings.sort(key=lambda f: (f is not named, f.rule not in ("capacity", "peak"), -f.size_bytes))
    advice = advise(recording)
    cause: Cause = named.cause if named and named.cause else "none"
    # The cause's own first, then those that rescue, then by bytes; duplicates removed.
    own = named.fixes if named else ()
    others = [fix for finding in findings if finding is not named for fix in finding.fixes]
    ranked = sorted([*others, *advice.fixes], key=lambda fix: (not fix.rescues, -fix.saves_bytes))
    sentence, fixes = _sentence(case, named, findings), _one_of_a_kind((*own, *ranked))
    return Diagnosis(cause, sentence, tuple(findings), fixes, advice.larger_card, advice.total)


def advice_for(recording: Recording) -> Advice:
    """Return the advice that ends a report: for a failed run, why it failed and everything that would help.

    For a run that climbs, only what stops that: saving memory elsewhere does not help.
    """
    if recording.oom is None:
        ahead, advice = outlook_of(recording), advise(recording)
        others = () if ahead.climb and ahead.fixes else advice.fixes
        return replace(advice, fixes=_one_of_a_kind((*ahead.fixes, *others)), outlook=ahead)
    found = diagnose(recording)
    return Advice(found.fixes, found.larger_card, found.sentence, found.total)


def _named(case: Case, findings: list[Finding]) -> Finding | None:
    if case.death:
        # The largest finding that alone would have left room.
        enough = [f for f in findings if f.cause and f.waste_bytes and f.waste_bytes >= case.death.shortage_bytes]
        capacity = next((f for f in findings if f.cause == "capacity"), None)
        return max(enough, key=lambda finding: finding.waste_bytes, default=capacity)
    of_phases = [f for f in findings if f.cause in _OF_PHASES and f.fixes]
    of_phases.sort(key=lambda finding: -finding.fixes[0].saves_bytes)
    ranked = [f for f in findings if f.cause in _WITHOUT_END]
    ranked += [f for f in of_phases if f.fixes[0].saves_bytes >= _PHASE_SHARE * case.peak_bytes]
    ranked += [f for cause in _OF_RUNS_THAT_WENT_ON for f in findings if f.cause == cause]
    return ranked[0] if ranked else None


def _sentence(case: Case, named: Finding | None, findings: list[Finding]) -> str:
    if named is None:
        return f"Nothing is wrong with its memory: {findings[0].sentence}." if findings else "It allocated nothing."
    words = named.sentence
    if named.cause == "capacity":
        assert case.death and case.recording.oom
        death, line = case.death, case.recording.oom.line
        asked, held, short = map(format_bytes, (death.requested_bytes, death.allocated_bytes, death.shortage_bytes))
        words = f"it asked for {asked} more{f' at {line}' if line else ''}, on top of {held}, {short} short"
        words += "".join(f"; {finding.sentence}" for finding in findings if finding.rule == "surprising-tensor")
        if any(finding.rule == "own-limit" for finding in findings):
            return f"Its own limit is too small for it: {words}."
    return f"{_TITLES[named.cause or 'none']}: {words}."


def _one_of_a_kind(fixes: Iterable[Fix]) -> tuple[Fix, ...]:
    """Remove duplicates, and changes that save the same bytes: a cause and a rewrite may both offer one."""
    found: list[Fix] = []
    for fix in fixes:
        if all(fix.how != one.how and (fix.change, fix.saves_bytes) != (one.change, one.saves_bytes) for one in found):
            found.append(fix)
    return tuple(found)


def outlook_of(recording: Recording) -> Outlook:
    """Return the outlook; empty for a failed run, whose cause says it all."""
    if recording.oom is not None or not recording.allocations:
        return Outlook()
    case = Case(recording)
    climbing = _leak(case) or _creep(case)
    found = filter(None, (rule(case) for rule in _PHASE_RULES))
    least = _WORTH_SHARE * case.peak_bytes
    said = [finding for finding in found if finding.fixes and finding.fixes[0].saves_bytes >= least]
    caches = [finding for rule in _CACHE_RULES if (finding := rule(case))]
    kept = leak(case)
    if kept is not None and kept.cause == "unbounded-cache":
        caches.append(kept)
    lines = [*(finding.sentence for finding in (*said, *caches[:1])), *_lengths(case)]
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
    turns = case.comparable_turns
    numbers = [bisect_right(turns, a.born) for a in kept.blocks]
    each = kept.size_bytes // (max(numbers) - min(numbers) + 1)
    # The first step that would not fit at constant growth; None if the card is unknown.
    header = case.recording.header
    room = header.capacity_bytes - header.overhead_bytes - case.recording.peak_reserved_bytes
    climb = Climb(each, len(turns) + max(0, room) // each + 1 if header.capacity_bytes and each else None)
    ahead = ""
    if climb.dies_at_step is not None and case.recording.begins_at:  # the number of earlier steps is unknown
        ahead = f": the card is full after about {climb.dies_at_step - len(turns):,} more"
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
    # Where what is alive between the steps climbs as well, reserved memory follows it.
    floors = [timeline.allocated_bytes[max(start - 1, 0)] for start, _ in steps[half:]]
    if floors[-1] - floors[0] >= _CREEP_SHARE * floors[0] > 0:
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

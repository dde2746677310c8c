"""Why a run ran out of memory, or what is wrong with one that completed: a cause, the evidence, ranked fixes.

A run failed because of whatever would have left room for the failed request; of several the largest is the cause, and
if there is none, the card was too small. A run that completed has a cause only if it could not go on forever (a leak,
an unbounded cache), if most of its memory is unused, or if its peak is in an evaluation, a checkpoint or waiting
batches and a tenth of it is avoidable.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.explain.case import Case
from tonnage.explain.causes import RULES
from tonnage.explain.fixes import Advice, Cause, Finding, Fix, advise
from tonnage.explain.outlook import outlook_of
from tonnage.explain.total import Total
from tonnage.recording import ClusterSummary, Recording
from tonnage.units import format_bytes

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

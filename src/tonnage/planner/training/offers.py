"""Alternatives to the answer: the best plan of each other framework, with the compiler, with offload, in other
precisions.

They are not the answer by themselves: frameworks with their own blocks and `torch.compile` have requirements that a
plan cannot check, and BF16 parameters and 8-bit states change the numerics. Each comes with its flag. Only the layouts
that were fastest are evaluated again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.training.configuration import FrameworkName, architectures
from tonnage.clock.ranges import comparison_error
from tonnage.planner.training.demands import are_met, demands_of
from tonnage.planner.training.request import FRAMEWORK_STAGES, NO_OFFLOAD, Offload, TrainingRequest
from tonnage.planner.training.search import HEADROOM, Judged, PlanSearch, TrainingPlan, explore, plan_of
from tonnage.planner.training.simplicity import fastest, simplest
from tonnage.planner.training.space import RUNNERS, Layouts, layouts, shardings
from tonnage.techniques import asked_by_flag

# Layouts of one sharding that are evaluated again: fewer if a change favours all alike.
_LAYOUTS, _LIKELY_LAYOUTS = 96, 12
_CONSIDERED = 4000
# Another framework's plan that loses more is not shown.
_FAR_SLOWER = 0.2
_COMPILES: tuple[FrameworkName, ...] = ("torch", "fsdp2", "deepspeed")


@dataclass(frozen=True, slots=True)
class Offer:
    """An alternative plan, the flag that selects it, and its speedup over the answer."""

    change: str
    flag: str
    plan: TrainingPlan
    gain: float
    numbers: bool = False  # whether it changes the numerics


def offers(findings: PlanSearch) -> list[Offer]:
    """Return other frameworks, and changes that gain more than the clock's error, fastest first; none if nothing fits."""
    best = findings.best
    if best is None:
        return []
    rows = layouts(findings.shape, findings.cluster, findings.request)
    # The highest speed of each layout in any sharding.
    codes = np.concatenate([_codes(one.family.configuration) for one in findings.judged])
    speeds = np.concatenate([one.tokens_per_s for one in findings.judged])
    order, asked = np.lexsort((speeds, codes)), _codes(rows)
    codes, speeds = codes[order], speeds[order]
    place = np.searchsorted(codes, asked, side="right") - 1
    rated = _Rated(findings, rows, np.where((place >= 0) & (codes[place] == asked), speeds[place], 0.0))
    changes = []
    # The fastest offloaded plan, if the answer does not offload.
    pool = [one for one in findings.pool if one.family.offload != NO_OFFLOAD and one.fits.any()]
    if best.offload == NO_OFFLOAD and pool:
        plan = plan_of(findings.shape, findings.cluster, findings.clock, *fastest(pool))
        gain = plan.tokens_per_s / best.tokens_per_s - 1
        changes.append(Offer("offload", f"--offload {plan.offload.words}", plan, gain))
    # The answer with the compiler, or with other numerics.
    request, chosen = findings.request, best.configuration
    tries = {
        "compile": not request.compile and chosen.framework in _COMPILES,
        "eight-bit-states": request.optimizer in ("adam", "adamw") and not request.lora_rank,
        "stochastic-bf16": request.precision in ("fp32", "tf32", "bf16-mixed") and not request.lora_rank,
    }
    places = (request.offload,) if request.offload else tuple(dict.fromkeys((NO_OFFLOAD, best.offload)))
    for change, flag, changed in (asked_by_flag(name) for name, applies in tries.items() if applies):
        pool = _looked_at_again(rated, replace(request, **changed), chosen.framework, places, _LIKELY_LAYOUTS)
        if offer := _offer(findings, best, change, flag, pool):
            changes.append(replace(offer, numbers="compile" not in changed))
    found = [*_frameworks(rated, best), *(offer for offer in changes if offer.gain > comparison_error())]
    return sorted(found, key=lambda offer: -offer.gain)


class _Rated(NamedTuple):
    """The findings, and every layout with its highest speed in any sharding."""

    findings: PlanSearch
    rows: Layouts
    speeds: NDArray[np.float64]


def _frameworks(rated: _Rated, best: TrainingPlan) -> Iterator[Offer]:
    """Yield the best plan of each framework that was not chosen, unless it is far slower."""
    findings = rated.findings
    request = findings.request
    if request.framework is not None:
        return
    plain = {name for names in RUNNERS.values() for name in names}
    for name in FRAMEWORK_STAGES:
        trained = architectures(name)
        whole = not request.lora_rank and findings.shape.unfrozen is None and request.objective.plain
        known = name in plain or (whole and not (trained and findings.shape.architecture not in trained))
        if name == best.configuration.framework or not known:
            continue
        pool = [one for one in findings.pool if one.family.configuration.framework == name]
        if not pool:
            # Frameworks with their own blocks have their own loss.
            asked = replace(request, framework=name, loss=request.loss or (None if name in plain else "full"))
            pool = _looked_at_again(rated, asked, name, (NO_OFFLOAD,), _LAYOUTS)
        offer = _offer(findings, best, name, f"--framework {name}", pool)
        if offer and offer.gain > -_FAR_SLOWER:
            yield offer


def _offer(findings: PlanSearch, best: TrainingPlan, change: str, flag: str, pool: list[Judged]) -> Offer | None:
    roomy = [replace(one, fits=one.leaves_headroom) for one in pool if one.leaves_headroom.any()]
    if not roomy:
        return None
    cluster = findings.cluster
    plan = plan_of(findings.shape, cluster, findings.clock, *simplest(roomy, cluster))
    return Offer(change, flag, plan, plan.tokens_per_s / best.tokens_per_s - 1)


def _looked_at_again(
    rated: _Rated, asked: TrainingRequest, framework: FrameworkName, places: tuple[Offload, ...], count: int
) -> list[Judged]:
    """Return the fitting layouts among the fastest, in the first of `places` where any fits."""
    findings = rated.findings
    shape, cluster = findings.shape, findings.cluster
    rows = rated.rows.where(np.argsort(-rated.speeds, kind="stable")[:_CONSIDERED])
    for offload in places:
        left = []
        for family in shardings(asked, rows, offload):
            if family.configuration.framework == framework:
                demands = demands_of(shape, family.configuration, cluster)
                on_card = demands[0].needed_bytes
                fits = are_met(demands, family.size) & (on_card <= (1 - HEADROOM) * cluster.gpu.memory_bytes)
                left.append(family.where(np.flatnonzero(fits)[:count]))
        left = [family for family in left if family.size]
        judged = explore(shape, cluster, findings.clock, left, worth_trying=1.0)
        if any(one.leaves_headroom.any() for one in judged):
            return judged
    return []


def _codes(numbers: Any) -> NDArray[np.uint64]:
    """Return one integer key per layout."""
    code = np.zeros(np.size(numbers.tp), dtype=np.uint64)
    for column in (numbers.tp, numbers.pp, numbers.cp, numbers.ep, numbers.micro_batch):
        code = code * np.uint64(0x9E3779B97F4A7C15) + np.asarray(column, dtype=np.uint64)
    return code

"""Why each rejected family lost: the memory its best member needs, or how much slower it is and why."""

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.demands import shortages
from tonnage.budget.time.step import StepTime
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import training_budget
from tonnage.planner.training.demands import demands_of
from tonnage.planner.training.search import HEADROOM, Judged, PlanSearch, TrainingPlan
from tonnage.planner.training.space import passes
from tonnage.units import GIB

DIMENSIONS = ("zero", "tp", "pp", "cp", "ep", "checkpoint", "loss", "offload")
_Member = tuple[Judged, NDArray[np.bool_]]  # a family, and which of its configurations
# Share of a step below which a part is not mentioned.
_WORTH_SAYING = 0.05
_CAUSES = {
    "collectives": "collectives take {share:.0f} % of the step",
    "bubble": "the pipeline is empty for {share:.0f} % of it",
    "recompute": "recomputing takes {share:.0f} % of the step",
    "offload": "offloading takes {share:.0f} % of the step",
    "optimizer": "the update takes {share:.0f} % of the step",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One value of one choice: `needs_bytes` if it does not fit, else `slower`, the relative loss of speed."""

    choice: str
    value: str
    words: str
    needs_bytes: int | None = None
    slower: float | None = None


def rejected(findings: PlanSearch) -> list[Reason]:
    """Return every searched value of every choice except the best plan's; empty if nothing fits."""
    best = findings.best
    if best is None:
        return []
    found = []
    for choice in DIMENSIONS:
        # The configurations with each value, family by family.
        values: dict[str, list[_Member]] = {}
        for one in findings.pool:
            setting = one.family.offload.words if choice == "offload" else getattr(one.family.configuration, choice)
            if isinstance(setting, np.ndarray):
                for value in sorted(set(setting.tolist())):
                    values.setdefault(str(value), []).append((one, setting == value))
            else:
                values.setdefault(str(setting), []).append((one, np.ones(one.family.size, dtype=bool)))
        for way in passes(findings.request, best.offload)[::-1]:  # including those that no layout needed
            if choice in ("checkpoint", "loss"):
                values.setdefault(way[choice == "loss"], [])
        taken = best.offload.words if choice == "offload" else str(getattr(best.configuration, choice))
        reasons = (_reason(findings, best, choice, value, values[value]) for value in values if value != taken)
        found += [reason for reason in reasons if reason is not None]
    return found


def _reason(findings: PlanSearch, best: TrainingPlan, choice: str, value: str, members: list[_Member]) -> Reason | None:
    found = []
    for one, chosen in members:
        if (chosen & one.fits).any():
            index = int(np.where(chosen & one.fits, one.tokens_per_s, -1.0).argmax())
            found.append((float(one.tokens_per_s[index]), one.family.configuration.at(index)))
    if choice in ("checkpoint", "loss"):
        # The best plan with more recomputation than it needs, which the search skips.
        changed: dict[str, Any] = {choice: value}
        beside, cluster = replace(best.configuration, **changed), findings.cluster
        demands = demands_of(findings.shape, beside, cluster)
        on_card = demands[0].needed_bytes
        if not shortages(demands) and on_card <= (1 - HEADROOM) * cluster.gpu.memory_bytes:
            found.append((float(findings.clock.step(beside).tokens_per_s), beside))
    if not found:
        return _too_large(findings, choice, value, members) if members else None
    speed, other = max(found, key=itemgetter(0))
    slower = 1 - speed / best.tokens_per_s
    if slower < _WORTH_SAYING / 10:
        equal = slower > -_WORTH_SAYING / 5
        words = "as fast, and asks for more" if equal else "no slower, within what the clock errs by"
        return Reason(choice, value, words, slower=slower)
    said = [f"{100 * slower:.0f} % slower" if slower >= _WORTH_SAYING / 5 else "a little slower"]
    cause = _cause(best, other, findings.clock.step(other))
    if other.tp > findings.cluster.gpus_per_host:
        said.append("crosses hosts")
        cause = cause.replace("of the step", "of it")
    return Reason(choice, value, ", ".join(filter(None, [*said, cause])), slower=slower)


def _too_large(findings: PlanSearch, choice: str, value: str, members: list[_Member]) -> Reason:
    config, cluster = _nearest(members), findings.cluster
    ledger = training_budget(findings.shape, config, cluster.gpu).ledger_at(0)
    lacking = shortages(demands_of(findings.shape, config, cluster))
    if not lacking:
        words = f"leaves less than {100 * HEADROOM:.0f} % of the card free"
        return Reason(choice, value, words, needs_bytes=ledger.total_bytes)
    first = lacking[0]
    words = first.words
    if first.part == "GPU":
        category, size = next(ledger.ranked())
        words = f"needs {ledger.total_bytes / GIB:,.0f} GiB a GPU, of which {size / GIB:,.0f} {category.label}"
    return Reason(choice, value, words, needs_bytes=round(float(first.needed_bytes)))


def _nearest(members: list[_Member]) -> Configuration:
    """Return the configuration that lacks least; among equals, the one that needs least memory on a GPU."""
    candidates: list[tuple[float, float, int, Configuration]] = []
    for one, chosen in members:
        if chosen.any():
            rows = np.flatnonzero(chosen)
            row = int(rows[np.lexsort((one.total_bytes[rows], one.missing_bytes[rows]))[0]])
            sizes = float(one.missing_bytes[row]), float(one.total_bytes[row])
            candidates.append((*sizes, len(candidates), one.family.configuration.at(row)))
    return min(candidates)[-1]


def _cause(best: TrainingPlan, other: Configuration, time: StepTime) -> str:
    """Return the part that grew most per token, if it is large enough to mention."""
    tokens, best_tokens = float(time.tokens), best.step_s * best.tokens_per_s
    grown = {name: float(part) / tokens - best.parts_s[name] / best_tokens for name, part in time.parts.items()}
    name = max(grown, key=lambda part: grown[part])
    share = float(time.parts[name] / time.total_s)
    if name in _CAUSES and share >= _WORTH_SAYING / 5:
        return _CAUSES[name].format(share=100 * share)
    if other.pp > best.configuration.pp:
        return "the stage with the head is slower"
    if other.micro_batch < best.configuration.micro_batch:
        return f"leaves room for a micro-batch of {other.samples} only"
    return "its products are smaller" if name in ("forward", "backward") else ""

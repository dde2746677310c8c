"""What a plan says of an objective beyond next tokens: its samples, its frozen model, the batch that one pass can see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tonnage.ledger import Category
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.planner.search import Findings, Plan

_WITHOUT_COPY = {
    "adapters-off": "the reference is the model without its adapters",
    "precomputed": "the reference has read all samples before",
}


def objective_notes(findings: Findings) -> Iterator[str]:
    """Samples of a step and in a second; what is frozen; for pairs that are each other's negatives, how many fit."""
    plan = findings.closest
    objective = plan.configuration.objective
    words = [f"{objective.name}: {plan.samples:,} {objective.sample} a step"]
    if findings.fits:
        pace = plan.samples / plan.step_s
        words.append(f"{pace:,.0f} {objective.sample}/s" if pace >= 100 else f"{pace:.3g} {objective.sample}/s")
    if objective.holds_frozen:
        named = f" {objective.teacher.name}" if objective.teacher else ""
        on_gpu = plan.configuration.parameter_place == "gpu"
        size = f" {frozen_bytes(plan) / GIB:,.1f} GiB a GPU" if on_gpu else ", which is not on the GPU"
        words.append(f"+ {objective.frozen_name}{named}{size}")
    elif objective.how:
        words.append(_WITHOUT_COPY[objective.how])
    yield ", ".join(words)
    if objective.grad_cache:
        yield "texts of a pair go through one by one, first without gradients: a micro-batch is as many of one side"
    free = findings.request.micro_batch is None and findings.request.global_batch is None
    if findings.fits and objective.sees_whole_batch and free:
        from tonnage.planner.holders import largest_micro_batch

        most = largest_micro_batch(findings)
        yield f"at most {most:,} {objective.sample} fit in a pass of one GPU; --grad-cache takes a larger batch in parts"


def frozen_bytes(plan: Plan) -> int:
    """Weights of a reference or a teacher on one GPU."""
    objective = plan.configuration.objective
    if not objective.holds_frozen:
        return 0
    kept = (term for term in plan.terms if term.category is Category.PARAMETERS)
    return round(sum(float(term.size_bytes) for term in kept if term.name.startswith(objective.frozen_name)))


def objective_figures(plan: Plan) -> dict[str, Any]:
    """The same for programs, among the choices of a plan: batches count samples there, as the flags do."""
    objective = plan.configuration.objective
    teacher = objective.teacher.name if objective.teacher else None
    rounds = plan.configuration.accumulate * objective.in_pass // objective.sequences
    figures: dict[str, Any] = {"objective": objective.name, "reference": objective.how, "teacher": teacher}
    figures |= {"micro_batch": int(plan.configuration.samples), "accumulate": int(rounds)}
    return figures | {"sequences_per_sample": objective.sequences}

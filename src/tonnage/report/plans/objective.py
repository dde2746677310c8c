"""Notes on a plan whose objective is not next-token prediction, or whose model has several parts.

For an objective: its samples, its frozen model, the batch that one pass can see. For parts: images, and what is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tonnage.ledger import Category
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.budget.training.configuration import Configuration
    from tonnage.models.shape import ModelShape
    from tonnage.planner.training.search import PlanSearch, TrainingPlan

_WITHOUT_COPY = {
    "adapters-off": "the reference is the model without its adapters",
    "precomputed": "the reference has read all samples before",
}


def objective_notes(findings: PlanSearch) -> Iterator[str]:
    """Yield samples per step and second, what is frozen, and for in-batch negatives how many pairs fit."""
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


def frozen_bytes(plan: TrainingPlan) -> int:
    """Return the weights of a reference or teacher on one GPU."""
    objective = plan.configuration.objective
    if not objective.holds_frozen:
        return 0
    kept = (term for term in plan.terms if term.category is Category.PARAMETERS)
    return round(sum(float(term.size_bytes) for term in kept if term.name.startswith(objective.frozen_name)))


def objective_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Return JSON values for a plan's choices; batches count samples, as the flags do."""
    objective = plan.configuration.objective
    teacher = objective.teacher.name if objective.teacher else None
    rounds = plan.configuration.accumulate * objective.in_pass // objective.sequences
    figures: dict[str, Any] = {"objective": objective.name, "reference": objective.how, "teacher": teacher}
    figures |= {"micro_batch": int(plan.configuration.samples), "accumulate": int(rounds)}
    return figures | {"sequences_per_sample": objective.sequences}


def part_words(shape: ModelShape, configuration: Configuration) -> Iterator[str]:
    """Yield notes below the headline; none for a text model that is trained whole."""
    tower = next((stack for stack in shape.stacks[:-1] if stack.picture), None)
    if tower is not None and shape.projector is not None and shape.projector.tokens:
        seen = f"{tower.sequences} × {tower.tokens:,}" if tower.sequences > 1 else f"{tower.tokens:,}"
        inside = f"{shape.projector.tokens:,} of the {configuration.seq:,} of a sequence"
        yield f"images of a sample: {seen} tokens in their tower, {inside}"
    if shape.unfrozen is not None:
        trained = shape.trained_parameters
        frozen = f"{_count(shape.parameters - trained)} parameters are frozen"
        if configuration.lora_rank:
            yield f"{frozen} with no adapters beside them"
            return
        held = "16 bits" if configuration.compute_bytes == 2 else "FP32"
        yield f"{_count(trained)} parameters are trained; {frozen}, in {held}, without gradients and states"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"

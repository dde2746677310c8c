"""The options of `fit` where a Trainer runs the loop."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import FitOptions, fit
from tonnage.fit.plan import FitPlan, given_plan
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.stepping.batches import MicroBatch, batch_rows, split
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.measuring import parameter_bytes
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.training import Batch, Loss, Training
from tonnage.units import budget_bytes


def fit_in_loop(
    options: FitOptions,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss,
    sample: Batch,
    clip_norm: float | None,
    refused: Mapping[str, str],
    gradients_wait: bool,
) -> Fitted:
    """Call `tonnage.fit`. `refused` are techniques that this loop rules out, each with the reason.

    `gradients_wait` means that the sample is one of several batches of a step, so gradients of earlier ones exist
    from the start. Their bytes are set aside.
    """
    given = {field.name: getattr(options, field.name) for field in fields(FitOptions)}
    given |= {"plan": plan_for_loop(options, refused), "without": (*options.without, *refused)}
    waiting_bytes = 0
    if gradients_wait and given["plan"] is None:
        waiting_bytes = parameter_bytes(trained_parameters(optimizer))
        free_bytes = GpuMeter(next(model.parameters()).device).free_bytes()
        given["budget"] = budget_bytes(options.budget, free_bytes) - waiting_bytes
    fitted = fit(model, optimizer, loss=loss, sample=sample, clip_norm=clip_norm, **given)
    if waiting_bytes:
        add_waiting(fitted, waiting_bytes)
    return fitted


def plan_for_loop(options: FitOptions, refused: Mapping[str, str]) -> FitPlan | None:
    """Return the plan, which must not hold a refused technique."""
    plan = None if options.plan is None else given_plan(options.plan)
    for technique in plan.techniques if plan else ():
        if technique.name in refused:
            raise RequestError(
                f"The plan holds {technique.name}, which cannot be used in this training loop: "
                f"{refused[technique.name]}.",
                hint="Make the plan again with this Trainer.",
            )
    return plan


def add_waiting(fitted: Fitted, waiting_bytes: int) -> None:
    """Add the set-aside bytes, so that the summary shows the requested budget and the whole peak."""

    def added(record: FitPlan | Rehearsed, *names: str) -> Any:
        return replace(record, **{name: getattr(record, name) + waiting_bytes for name in names})

    fitted.plan = added(fitted.plan, "budget_bytes", "peak_bytes", "plain_peak_bytes")
    if fitted.measured is not None:
        fitted.measured = added(fitted.measured, "peak_allocated_bytes", "peak_reserved_bytes")


def parts_of(training: Training, batch: Batch, share: float) -> list[MicroBatch]:
    """Divide a batch that is this share of a step into micro-batches as large as those planned."""
    rows = -(-batch_rows(training.sample) // training.micro_batches)
    parts = split(batch, -(-batch_rows(batch) // rows), training.weighting)
    return [MicroBatch(part.batch, part.weight * share) for part in parts]

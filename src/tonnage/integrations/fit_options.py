"""The options of `fit` where a Trainer runs the loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import fit
from tonnage.fit.plan import FitPlan, read_plan
from tonnage.fit.stepping.batches import MicroBatch, Weighting
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.measuring import parameter_bytes
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.training import Batch, Loss
from tonnage.units import budget_bytes


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of `tonnage.fit` that do not follow from the Trainer."""

    budget: str | int | None = None
    host: str | int | None = None
    exact: bool = True
    allow: Sequence[str] = ()
    without: Sequence[str] = ()
    weighting: Weighting = "auto"
    dropout: str = "same"
    plan: FitPlan | str | Path | None = None
    measure: bool = True
    verbose: bool = False

    def fit(
        self,
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
        plan = self._plan(refused)
        waiting_bytes = parameter_bytes(trained_parameters(optimizer)) if gradients_wait and plan is None else 0
        budget = self.budget
        if waiting_bytes:
            device = next(model.parameters()).device
            budget = budget_bytes(budget, GpuMeter(device).free_bytes()) - waiting_bytes
        fitted = fit(
            model,
            optimizer,
            loss=loss,
            sample=sample,
            budget=budget,
            host=self.host,
            exact=self.exact,
            allow=self.allow,
            without=(*self.without, *refused),
            clip_norm=clip_norm,
            weighting=self.weighting,
            dropout=self.dropout,
            plan=plan,
            measure=self.measure,
            verbose=self.verbose,
        )
        _add_waiting(fitted, waiting_bytes)
        return fitted

    def _plan(self, refused: Mapping[str, str]) -> FitPlan | None:
        plan = read_plan(self.plan) if isinstance(self.plan, str | Path) else self.plan
        for technique in plan.techniques if plan else ():
            if technique.name in refused:
                raise RequestError(
                    f"The plan holds {technique.name}, which cannot be used in this training loop: "
                    f"{refused[technique.name]}.",
                    hint="Make the plan again with this Trainer.",
                )
        return plan


def _add_waiting(fitted: Fitted, waiting_bytes: int) -> None:
    """Add the set-aside bytes, so that the summary shows the requested budget and the whole peak."""
    if not waiting_bytes:
        return
    plan, measured = fitted.plan, fitted.measured
    fitted.plan = replace(
        plan,
        budget_bytes=plan.budget_bytes + waiting_bytes,
        peak_bytes=plan.peak_bytes + waiting_bytes,
        plain_peak_bytes=plan.plain_peak_bytes + waiting_bytes,
    )
    if measured is not None:
        fitted.measured = replace(
            measured,
            peak_allocated_bytes=measured.peak_allocated_bytes + waiting_bytes,
            peak_reserved_bytes=measured.peak_reserved_bytes + waiting_bytes,
        )


def shared_out(parts: Iterable[MicroBatch], share: float) -> list[MicroBatch]:
    """Scale the weights of parts of a batch that is this share of a step."""
    return [MicroBatch(part.batch, part.weight * share) for part in parts]

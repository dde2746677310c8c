"""Find the largest batch or the longest sequence of one step within a budget: predict, then confirm from below.

The step's parts are measured alone at a few small sizes and composed (`step_curve`). One real step at a size with a
margin shows what the prediction missed, and a second one confirms the answer. Parameters, gradients, states and RNG
states are restored. It does not know how a technique works.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.checks import check_clip_norm, check_finite, check_loss, check_request, check_sample
from tonnage.fit.choose.infeasible import DoesNotFit
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.plan import FitPlan, read_plan
from tonnage.fit.prove.rehearsal import Rehearsed, rehearse
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.growth import Axis, Rows, Tokens
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.step_curve import StepCurve
from tonnage.fit.survey.undisturbed import undisturbed
from tonnage.fit.technique import Technique
from tonnage.fit.training import Batch, Loss, Training
from tonnage.fit.virtual import uncaptured
from tonnage.units import budget_bytes, format_bytes

# Predicted share of the budget for the first real step: the rest covers what the prediction misses.
_FIRST_SHARE = 0.85
# The second step, corrected by the first, takes this share; if the first was too large there is no third.
_LAST_SHARE = 0.995
_SAFE_SHARE = 0.9
# Parts are measured again at this share of the answer, to shorten the extrapolation. Alone they take far less.
_SHORT_WAY = 0.9
_REFINEMENTS = 4
_BEYOND = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Found:
    """The size, and the GPU memory of one step of it."""

    size: int  # rows, or tokens of a sequence
    predicted_peak_bytes: int  # allocated, from the step's parts alone
    measured_peak_bytes: int  # allocated in a real step of this size
    reserved_peak_bytes: int  # by PyTorch in that step: what the budget limits
    steps_run: int  # real steps near this size


def largest_batch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss,
    sample: Batch,
    budget: str | SupportsFloat | None = None,
    clip_norm: float | None = None,
    fitted: Fitted | FitPlan | str | Path | None = None,
    at_most: int | None = None,
    multiple_of: int = 1,
) -> Found:
    """Return the most rows that one step can have within a budget.

    | argument      | means                                                                                      |
    |---------------|--------------------------------------------------------------------------------------------|
    | `sample`      | a batch as the training loop uses it; its rows are repeated to make larger ones            |
    | `budget`      | what PyTorch may reserve on the GPU: "40 GiB", bytes, or "80%" of what it can use          |
    |               | (what it has reserved plus what is free on the card); default: all of that                 |
    | `fitted`      | what `fit` returned for this model, or a plan to apply meanwhile (default: the plain step) |
    | `at_most`     | upper limit of the search                                                                  |
    | `multiple_of` | the answer is a multiple of this                                                           |
    """
    with _training(model, optimizer, loss, sample, clip_norm, fitted) as (training, techniques):
        axis = Rows(sample, multiple_of, at_most, micro_batches=training.micro_batches)
        return _LimitSearch(training, techniques, axis, budget).run()


def longest_sequence(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss,
    sample: Batch,
    budget: str | SupportsFloat | None = None,
    clip_norm: float | None = None,
    fitted: Fitted | FitPlan | str | Path | None = None,
    at_most: int | None = None,
    multiple_of: int = 64,
    dimension: int = 1,
) -> Found:
    """Return the most tokens that each row of one step can have within a budget, with the sample's rows.

    The arguments are those of `largest_batch`; `dimension` is the sequence dimension of the sample's tensors. A
    model with learned positions never gets more tokens than it has positions.
    """
    with _training(model, optimizer, loss, sample, clip_norm, fitted) as (training, techniques):
        axis = Tokens(sample, multiple_of, at_most, dimension=dimension, model=model)
        return _LimitSearch(training, techniques, axis, budget).run()


@contextmanager
def _training(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    sample: Batch,
    clip_norm: float | None,
    fitted: Fitted | FitPlan | str | Path | None,
) -> Iterator[tuple[Training, tuple[Technique, ...]]]:
    """Yield the training with its techniques applied; restore it afterwards."""
    if isinstance(fitted, Fitted):
        if fitted.model is not model or fitted.optimizer is not optimizer:
            raise RequestError(
                "What was fitted is another model or optimizer.", hint="Give fitted.model and fitted.optimizer."
            )
        if clip_norm is not None:
            raise RequestError("What was fitted clips as it was told.", hint="Give clip_norm to fit, not here.")
        check_sample(sample, fitted.training.device)
        yield replace(fitted.training, loss=loss, sample=sample), fitted.techniques
        return
    device = check_request(model, optimizer, sample)
    check_clip_norm(clip_norm)
    stepper = Stepper(optimizer, clip_norm=clip_norm)
    training = Training(model=model, optimizer=optimizer, loss=loss, sample=sample, device=device, stepper=stepper)
    fresh = not optimizer.state
    placed = None
    try:
        if fitted is not None:
            placed = apply_plan(training, fitted if isinstance(fitted, FitPlan) else read_plan(fitted))
        yield training, placed.techniques if placed else ()
    finally:
        if placed:
            placed.undo()
        if fresh:
            optimizer.state.clear()


class _LimitSearch:
    def __init__(
        self, training: Training, techniques: tuple[Technique, ...], axis: Axis, budget: str | SupportsFloat | None
    ) -> None:
        self.training, self.axis = training, axis
        self.meter = GpuMeter(training.device, timed=False)
        self.budget_bytes = free_bytes = self.meter.free_bytes()
        if budget is not None:
            self.budget_bytes = budget_bytes(budget, free_bytes)
        if self.budget_bytes > free_bytes:
            asked, had = format_bytes(self.budget_bytes), format_bytes(free_bytes)
            raise RequestError(
                f"The budget is {asked}, and this card has {had} for PyTorch.",
                hint="Leave budget out to use what is free.",
            )
        self.curve = StepCurve(training, self.meter, techniques, axis.grow, degree=axis.degree)
        self.steps_run = 0
        self.fresh = not training.optimizer.state
        self.stepping_bytes = 0  # while the optimizer steps, if real steps do not show it

    def run(self) -> Found:
        with uncaptured(), undisturbed(self.training.model, self.training.device):
            batch = self.axis.grow(self.axis.smallest)
            with torch.enable_grad(), self.training.forward_pass():
                loss = self.training.loss(self.training.model, batch)
            check_loss(loss)
            check_finite(loss, batch)
            del loss, batch
            # Measure small sizes, then sizes closer to the answer they predict.
            for size in self.axis.first_sizes():
                if self.curve.sizes and self._largest(self.curve.peak, self.budget_bytes) < size:
                    break
                self.curve.measure(size)
            for _ in range(_REFINEMENTS):
                answer = self._largest(self.curve.peak, self.budget_bytes)
                nearer = self.axis.down(int(answer * _SHORT_WAY))
                if not nearer or any(nearer <= size <= answer for size in self.curve.sizes):
                    break
                self._look(nearer)
            # The minimum of any step must fit.
            step_bytes = self.curve.step_bytes()
            needed_bytes = max(self.curve.peak(self.axis.smallest), step_bytes)
            if needed_bytes > self.budget_bytes:
                raise self._does_not_fit(self.axis.smallest, needed_bytes)
            if not self.fresh:  # real steps skip an optimizer that already has states
                self.stepping_bytes = step_bytes
            return self._confirm()

    def _look(self, size: int) -> None:
        with suppress(torch.OutOfMemoryError):
            self.curve.measure(size)

    def _largest(self, peak: Callable[[int], int], limit_bytes: float) -> int:
        """Return the largest size whose peak is within the limit, by doubling and bisection; 0 if none is."""
        unit, high = self.axis.smallest, self.axis.largest
        low = 0
        step = unit
        while step <= (high or _BEYOND) and peak(step) <= limit_bytes:
            low, step = step, 2 * step
        if high is None and low > _BEYOND // 2:
            raise RequestError(
                f"The memory of a step does not grow with its {self.axis.noun}, as far as can be seen.",
                hint=f"Give at_most: the most {self.axis.noun} that make sense.",
            )
        top = min(step - unit, high) if high is not None else step - unit
        while top - low >= unit:
            middle = low + max(unit, self.axis.down((top - low) // 2))
            low, top = (middle, top) if peak(middle) <= limit_bytes else (low, middle - unit)
        return low

    def _confirm(self) -> Found:
        first = self._step(self._largest(self.curve.peak, self.budget_bytes * _FIRST_SHARE) or self.axis.smallest)
        fits = first.reserved_peak_bytes <= self.budget_bytes
        share = _LAST_SHARE if fits else _SAFE_SHARE
        size = self._largest(self._corrected(first), self.budget_bytes * share)
        if size > first.size:  # never beyond measured parts: chunks and tiles make the curve jump
            self._look(size)
            size = min(size, self._largest(self._corrected(first), self.budget_bytes * share))
        if fits and size <= first.size:
            return first
        second = self._step(size) if size else first
        if second.reserved_peak_bytes <= self.budget_bytes:
            return second
        if fits:
            return replace(first, steps_run=self.steps_run)
        raise self._does_not_fit(second.size, second.reserved_peak_bytes)

    def _corrected(self, seen: Found) -> Callable[[int], int]:
        """Correct the prediction: an underestimate grows with the step, an overestimate is constant."""
        missed = seen.reserved_peak_bytes - seen.predicted_peak_bytes

        def peak(size: int) -> int:
            predicted_bytes = self.curve.peak(size)
            return predicted_bytes + int(missed * (predicted_bytes / seen.predicted_peak_bytes if missed > 0 else 1.0))

        return peak

    def _step(self, size: int) -> Found:
        """Take one real step and return its peak; more than the card has if it ran out of memory."""
        self.steps_run += 1
        try:
            batch = self.axis.grow(size)
            seen = rehearse(self.training, self.meter, batch, fresh=self.fresh, from_the_first=False)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            full = self.meter.capacity_bytes + 1
            seen = Rehearsed(peak_allocated_bytes=full, peak_reserved_bytes=full, stepped=False)
        return Found(
            size=size,
            predicted_peak_bytes=self.curve.peak(size),
            measured_peak_bytes=max(seen.peak_allocated_bytes, self.stepping_bytes),
            reserved_peak_bytes=max(seen.peak_reserved_bytes, self.stepping_bytes),
            steps_run=self.steps_run,
        )

    def _does_not_fit(self, size: int, needed_bytes: int) -> DoesNotFit:
        return DoesNotFit(
            f"A step of {size} {self.axis.noun} takes {format_bytes(needed_bytes)}, and the budget is "
            f"{format_bytes(self.budget_bytes)}.",
            hint="Give a larger budget, or let tonnage.fit make it fit and hand over what it returns: fitted=...",
            smallest_bytes=needed_bytes,
        )

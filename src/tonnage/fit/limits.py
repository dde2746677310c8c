"""Find the largest batch or the longest sequence of one step within a budget: predict, then confirm from below.

The step's parts are measured alone at a few small sizes and composed (`StepCurve`): each is a polynomial of the size,
linear in rows, quadratic in tokens where something grows with their square. One real step at a size with a margin shows
what the prediction missed, and a second one confirms the answer. Parameters, gradients, states and RNG states are
restored. It does not know how a technique works.
"""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.checks import check_clip_norm, check_finite, check_loss, check_request, check_sample
from tonnage.fit.choose.choosing import MemoryContext, peak_of
from tonnage.fit.choose.placement import (
    HOST_GRADIENTS,
    HOST_STATES,
    PLAIN,
    STEP_IN_BACKWARD,
    GradientPlace,
    ResidentState,
)
from tonnage.fit.choose.solver import DoesNotFit
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.modules import undisturbed, without_cache
from tonnage.fit.plan import FitPlan, given_plan
from tonnage.fit.prove.rehearsal import Rehearsed, rehearse
from tonnage.fit.stepping.batches import batch_rows, take_rows
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.growth import Axis, Rows, Tokens
from tonnage.fit.survey.measuring import bytes_of, measure_block, measure_outside
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile, mixed
from tonnage.fit.survey.resident_state import find_resident_state, with_coarse_states
from tonnage.fit.survey.survey import KEEP, SizeProfile, Survey
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
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
# Curvature below this share of a part is allocator rounding.
_BEND = 2e-3


Applicable = Fitted | FitPlan | str | Path | None  # what may be applied to a training while it is measured


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
    fitted: Applicable = None,
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
    fitted: Applicable = None,
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
    model: nn.Module, optimizer: Optimizer, loss: Loss, sample: Batch, clip_norm: float | None, fitted: Applicable
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
    device = check_request(model, optimizer, loss, sample)
    check_clip_norm(clip_norm)
    stepper = Stepper(optimizer, clip_norm=clip_norm)
    training = Training(model=model, optimizer=optimizer, loss=loss, sample=sample, device=device, stepper=stepper)
    with ExitStack() as stack:
        if not optimizer.state:
            stack.callback(lambda: optimizer.state.clear())
        techniques: tuple[Technique, ...] = ()
        if fitted is not None:
            placed = apply_plan(training, given_plan(fitted))
            stack.callback(placed.undo)
            techniques = placed.techniques
        yield training, techniques


class _LimitSearch:
    def __init__(
        self, training: Training, techniques: tuple[Technique, ...], axis: Axis, budget: str | SupportsFloat | None
    ) -> None:
        self.training, self.axis = training, axis
        self.meter = GpuMeter(training.device, timed=False)
        free_bytes = self.meter.free_bytes()
        self.budget_bytes = free_bytes if budget is None else budget_bytes(budget, free_bytes)
        if self.budget_bytes > free_bytes:
            asked, had = format_bytes(self.budget_bytes), format_bytes(free_bytes)
            raise RequestError(
                f"The budget is {asked}, and this card has {had} for PyTorch.",
                hint="Leave budget out to use what is free.",
            )
        self.curve = StepCurve(training, self.meter, techniques, axis)
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
                with suppress(torch.OutOfMemoryError):
                    self.curve.measure(nearer)
            # The minimum of any step must fit.
            step_bytes = self.curve.step_bytes()
            needed_bytes = max(self.curve.peak(self.axis.smallest), step_bytes)
            if needed_bytes > self.budget_bytes:
                raise self._does_not_fit(self.axis.smallest, needed_bytes)
            if not self.fresh:  # real steps skip an optimizer that already has states
                self.stepping_bytes = step_bytes
            return self._confirm()

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
        larger = range(low + unit, step if high is None else min(step, high + 1), unit)
        return low + unit * bisect_right(larger, limit_bytes, key=peak)

    def _confirm(self) -> Found:
        first = self._step(self._largest(self.curve.peak, self.budget_bytes * _FIRST_SHARE) or self.axis.smallest)
        fits = first.reserved_peak_bytes <= self.budget_bytes
        share = _LAST_SHARE if fits else _SAFE_SHARE
        size = self._largest(self._corrected(first), self.budget_bytes * share)
        if size > first.size:  # never beyond measured parts: chunks and tiles make the curve jump
            with suppress(torch.OutOfMemoryError):
                self.curve.measure(size)
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
            seen = rehearse(self.training, self.meter, self.axis.grow(size), fresh=self.fresh, from_the_first=False)
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


class StepCurve(Survey):
    """The peak of one step as a function of its size, from parts measured alone, with techniques as they are applied."""

    def __init__(self, training: Training, meter: GpuMeter, techniques: Sequence[Technique], axis: Axis) -> None:
        super().__init__(training, meter)
        self.axis, self._techniques = axis, techniques
        self._host_states = next((technique for technique in techniques if isinstance(technique, HostStates)), None)
        self._batch_bytes: dict[int, int] = {}  # by size
        self._labels: dict[str, str] = {}  # block name to its kind and what techniques do to it, in execution order
        self._resident: ResidentState | None = None

    def measure(self, size: int) -> None:
        """Measure every part at this size, each alone: this takes far less memory than the step."""
        if size not in self.sizes:
            self.sizes[size] = self._measure(size)
        if self._resident is None:  # only now: libraries have allocated their workspaces
            # What is allocated now includes parameters and existing states; states still to come are added.
            held = find_resident_state(self.training, self.meter, {name: self.blocks[name] for name in self._labels}, 0)
            gc.collect()
            states = 0 if self.training.optimizer.state else held.states_bytes
            if states and self._host_states is not None:
                states = min(self._host_states.gpu_bytes, states)
            elif states and "eight-bit-states" in self.training.applied:
                states = with_coarse_states(held, self.training).states_bytes
            parameters_bytes = self.meter.allocated_bytes + states
            self._resident = replace(held, parameters_bytes=parameters_bytes, besides_bytes=0, states_bytes=0)

    def _measure(self, rows: int) -> SizeProfile:
        """Measure without a KV cache, which would keep tensors of a block's earlier run.

        Real steps use the cache if the training has one.
        """
        batch = self.axis.grow(rows)
        undo = without_cache(self.training.model)
        try:
            return self._measure_alone(rows, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self.sizes or not self.blocks:
                raise
            self.blocks = {}  # blocks cannot run alone: treat the model as one piece
            return self._measure_alone(rows, batch)
        finally:
            undo()

    def _measure_alone(self, size: int, batch: Batch) -> SizeProfile:
        micro = take_rows(batch, slice(0, -(-batch_rows(batch) // self.training.micro_batches)))
        calls = self._capture(micro)
        kinds = list(calls.by_kind)  # in capture order, which is the same at every size
        self._labels = {}
        for name, kind in calls.kinds.items():
            changes = []  # what techniques do to this block in particular
            for technique in self._techniques:
                settings = technique.settings()
                if name in settings.get("modes", {}):
                    changes.append(f"{technique.name}={settings['modes'][name]}")
                elif name in (settings.get("blocks") or ()):
                    changes.append(f"{technique.name}={settings.get('what', '')}")
            self._labels[name] = f"{kinds.index(kind)}|{','.join(changes)}"
        outside = measure_outside(self.training, self.meter, self.blocks, calls, micro)
        self._batch_bytes[size] = bytes_of(batch)
        blocks: dict[str, dict[str, BlockProfile]] = {}
        for name, label in self._labels.items():
            if label not in blocks:
                _, call = calls.by_kind[calls.kinds[name]]
                blocks[label] = {KEEP: measure_block(self.meter, replace(call, block=self.blocks[name]))}
        return SizeProfile(size, self._labels, blocks, outside)

    def peak(self, size: int) -> int:
        """Return the bytes allocated at the peak of a step of this size, from the nearest measured sizes."""
        nearest = sorted(sorted(self.sizes, key=lambda seen: abs(seen - size))[: self.axis.degree + 1])

        def mix(*values: float) -> int:
            least = int(values[-1]) if size > nearest[-1] else 0  # extrapolation must not continue a decrease
            return max(least, extrapolate(nearest, values, size))

        seen = [self.sizes[one] for one in nearest]
        labels = set(self._labels.values())
        blocks = {label: {KEEP: mixed(mix, *(one.blocks[label][KEEP] for one in seen))} for label in labels}
        outside = mixed(mix, *(one.outside for one in seen))
        modes = [ways[0] for ways in SizeProfile(size, self._labels, blocks, outside).modes(offload=False)]
        # One window of in-flight copies is shared by all offloaded blocks.
        window = max((t.window_bytes or 0 for t in self._techniques if isinstance(t, ActivationOffload)), default=0)
        waiting = window
        for index, label in enumerate(self._labels.values()):
            if ActivationOffload.name in label:
                under_way = min(waiting, modes[index].kept_bytes)
                kept_bytes = max(0, modes[index].kept_bytes - window) + under_way
                modes[index] = replace(modes[index], kept_bytes=kept_bytes)
                waiting -= under_way
        return peak_of(modes, self._around(outside)) + mix(*(self._batch_bytes[one] for one in nearest))

    def step_bytes(self) -> int:
        """Return the bytes while the optimizer steps; independent of the size."""
        nothing = OutsideProfile(kept_bytes=0, peak_bytes=0, forward_s=0.0, backward_s=0.0)
        return self._around(nothing).fixed_bytes + self._around(nothing).step_peak_bytes

    def _around(self, outside: OutsideProfile) -> MemoryContext:
        """Build the memory context. States are already allocated, so the placement only decides whether gradients stay."""
        assert self._resident is not None, "measure a size first"
        held, count = self._resident, self.training.micro_batches
        placement = STEP_IN_BACKWARD if "step-in-backward" in self.training.applied else PLAIN
        if self._host_states is not None:
            placement = HOST_GRADIENTS if self._host_states.how == "host" else HOST_STATES
        frame = STEP_IN_BACKWARD if placement.gradients(held, count) is GradientPlace.PASS else PLAIN
        return frame.memory_context(held, outside, 0, count, backward_s=0.0)


def extrapolate(sizes: Sequence[int], values: Sequence[float], size: int) -> int:
    """Return the value at `size` of a curve through one to three points: linear, or quadratic if convex.

    Curvature below the allocator's rounding is ignored: at a hundred times the size its error would be ten thousand
    times as large. A concave curve (a chunk that is full) continues with its last slope.
    """
    assert len(sizes) == len(values) <= 3, "one value a size"
    if len(sizes) == 1:
        return int(values[0] * size / sizes[0])
    if len(sizes) == 2:
        slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
        return max(0, round(values[1] + slope * (size - sizes[1])))
    whole_slope = (values[2] - values[0]) / (sizes[2] - sizes[0])
    rise = values[0] + whole_slope * (sizes[1] - sizes[0]) - values[1]
    if rise > _BEND * abs(values[2]):
        bend = rise / ((sizes[1] - sizes[0]) * (sizes[2] - sizes[1]))
        straight = values[2] + whole_slope * (size - sizes[2])
        return max(0, round(straight + bend * (size - sizes[0]) * (size - sizes[2])))
    side = slice(1, 3) if size > sizes[1] else slice(0, 2)
    return extrapolate(sizes[side], values[side], size)

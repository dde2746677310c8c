"""Run one step of the training as it is to measure its peak, and change nothing.

The loss is multiplied by zero and the learning rate is zero: every kernel runs and every byte is allocated, but gradients
are zero and parameters stay. States that the step created are dropped, and counters are restored. An optimizer that has
already stepped would see its states decay, so it is not stepped here; its part of the peak is then only predicted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.fit.checks import check_finite
from tonnage.fit.modules import undisturbed
from tonnage.fit.stepping.host_step import PiecewiseStep
from tonnage.fit.stepping.parameter_step import Group, State, Step, parameter_steps, why_not_one_by_one
from tonnage.fit.stepping.pieces import StatePiece
from tonnage.fit.stepping.step import take_step
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.training import Batch, Training, set_attributes
from tonnage.units import format_bytes


@dataclass(frozen=True)
class Rehearsed:
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    stepped: bool  # whether the optimizer took part
    step_s: float | None = None  # on a real card, after warm-up; without the optimizer if that has stepped before

    @property
    def words(self) -> str:
        return f"{format_bytes(self.peak_allocated_bytes)} allocated, {format_bytes(self.peak_reserved_bytes)} reserved"


def rehearse(
    training: Training, meter: GpuMeter, batch: Batch | None = None, *, fresh: bool, from_the_first: bool = True
) -> Rehearsed:
    """Return the peak of a step on `batch`, or on the sample.

    `fresh` says that the optimizer has not stepped yet. `from_the_first` includes the first step, which creates the
    states among other allocations and may leave gaps.
    """
    batch = training.sample if batch is None else batch
    torch.cuda.empty_cache()
    with nothing_moves(training, fresh=fresh):
        with unstepped(training.optimizer) if from_the_first else nullcontext():
            take_step(training, batch)  # compiles what is not compiled yet
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(meter.device)
        for _ in range(2 if from_the_first else 1):
            torch.cuda.synchronize(meter.device)
            began_s = perf_counter()
            take_step(training, batch)
        torch.cuda.synchronize(meter.device)
        step_s = perf_counter() - began_s
        peaks = torch.cuda.max_memory_allocated(meter.device), torch.cuda.max_memory_reserved(meter.device)
    return Rehearsed(*peaks, stepped=fresh, step_s=step_s if from_the_first and not meter.virtual else None)


@contextmanager
def nothing_moves(training: Training, *, fresh: bool) -> Iterator[None]:
    """Make steps inside leave parameters, states, buffers and RNG states unchanged."""
    optimizer, plain = training.optimizer, training.loss

    def zeroed(model: nn.Module, batch: Batch) -> Tensor:
        loss = plain(model, batch)
        check_finite(loss, batch)  # zero times infinity is NaN, and would reach the parameters
        return loss * 0.0

    with ExitStack() as stack:
        stack.enter_context(undisturbed(training.model, training.device))
        stack.callback(set_attributes(training, loss=zeroed))
        stack.enter_context(unstepped(optimizer))
        # A third-party optimizer may change parameters without gradients: restore them from host copies.
        known = type(optimizer).__module__.startswith("torch.optim.")
        moved = [] if known or not fresh else [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in moved:
            stack.callback(parameter.detach().copy_, parameter.detach().to("cpu", copy=True))
        for group in optimizer.param_groups:
            values = {name: group[name] for name in _MOVING if name in group}
            stack.callback(group.update, values)
            group.update({n: torch.zeros_like(v) if isinstance(v, Tensor) else 0.0 for n, v in values.items()})
        if not fresh:  # states exist already: skip the steps
            stack.callback(set_attributes(optimizer, step=lambda *_, **__: None))
            if why_not_one_by_one(optimizer) is None:
                steps = parameter_steps(optimizer)
                if isinstance(steps.function, PiecewiseStep):  # its states still cross the link, and take room there
                    stack.callback(set_attributes(steps.function, inner=KeptStates(steps.function.inner)))
                else:
                    stack.callback(set_attributes(steps, function=KeptStates(steps.function)))
        yield


class KeptStates(Step):
    """Steps a parameter only if it has no states yet; those that exist stay as they are."""

    def __init__(self, inner: Step) -> None:
        self.inner = inner

    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        if not state:
            self.inner(parameter, gradient, state, group)


@contextmanager
def unstepped(optimizer: Optimizer) -> Iterator[None]:
    """Restore the optimizer's states, groups and attributes on exit."""
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    states = dict(optimizer.state)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    def put_back() -> None:
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for name in vars(optimizer).keys() - attributes.keys() - _OWN:
            del vars(optimizer)[name]
        vars(optimizer).update(attributes)
        for parameter in optimizer.state.keys() - states.keys():
            del optimizer.state[parameter]

    with ExitStack() as stack:
        stack.callback(put_back)
        for held in (*groups, *attributes.values(), *states.values()):
            _note(held, stack)
        yield


_MOVING = ("lr", "weight_decay")
# Handled separately above, or unaffected by steps.
_OWN = {"state", "param_groups", "defaults", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
_SMALL = 1024  # elements; larger tensors hold sums of gradients, which are zero here


def _note(value: Any, stack: ExitStack, depth: int = 4) -> None:
    """Push what restores an object in place, and the objects that it holds."""
    held: list[Any] = []
    if isinstance(value, Tensor):
        if value.numel() <= _SMALL:
            stack.callback(value.detach().copy_, value.detach().clone())
    elif isinstance(value, StatePiece):
        before = {name: getattr(value, name) for name in ("state", "started", "has_gradient")}
        stack.callback(vars(value).update, before)
        held, depth = list(before.values()), 5
    elif isinstance(value, dict) and depth:
        held = list(value.values())
        stack.callback(value.update, dict(value))
        stack.callback(value.clear)
    elif isinstance(value, list) and depth:
        held = list(value)
        stack.callback(value.__setitem__, slice(None), held)
    for each in held:
        _note(each, stack, depth - 1)

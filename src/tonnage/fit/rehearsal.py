"""One step of the training as it stands, to see its peak, after which nothing has changed.

The loss is multiplied by zero and the learning rate is zero: every kernel runs and every byte is allocated, but
gradients are zero, states that begin at zero stay there and parameters stay what they are. An optimizer that has been
stepped before would see its states fade, so it is not stepped here; its part of the peak is then predicted alone.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.fit.measure.measuring import undisturbed
from tonnage.fit.measure.meter import Meter
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_one_by_one
from tonnage.fit.stepping.pieces import Piece
from tonnage.fit.stepping.step import take_step
from tonnage.fit.training import Batch, Training, Undo
from tonnage.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    stepped: bool  # whether the optimizer took part

    @property
    def words(self) -> str:
        return f"{format_bytes(self.peak_allocated_bytes)} allocated, {format_bytes(self.peak_reserved_bytes)} reserved"


def rehearse(training: Training, meter: Meter, batch: Batch | None = None, *, fresh: bool) -> Rehearsed:
    """The peak of a step on `batch`, or on the sample. `fresh`: the optimizer has not taken a step yet."""
    batch = training.sample if batch is None else batch
    torch.cuda.empty_cache()
    with nothing_moves(training, fresh=fresh):
        if fresh:
            take_step(training, batch)  # makes the states
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(meter.device)
        take_step(training, batch)
        peaks = torch.cuda.max_memory_allocated(meter.device), torch.cuda.max_memory_reserved(meter.device)
    return Rehearsed(peak_allocated_bytes=peaks[0], peak_reserved_bytes=peaks[1], stepped=fresh)


@contextmanager
def nothing_moves(training: Training, *, fresh: bool) -> Iterator[None]:
    """Steps inside leave parameters, states, buffers and random numbers as they were."""
    try:
        with undisturbed(training.model, training.device), _zeroed_loss(training), _still(training, step=fresh):
            yield
    finally:
        if fresh:
            _forget_steps(training.optimizer)


@contextmanager
def _zeroed_loss(training: Training) -> Iterator[None]:
    plain = training.loss

    def zeroed(model: nn.Module, batch: Batch) -> Tensor:
        return plain(model, batch) * 0.0

    training.loss = zeroed
    try:
        yield
    finally:
        training.loss = plain


@contextmanager
def _still(training: Training, *, step: bool) -> Iterator[None]:
    """Steps that move nothing; where states exist already, no steps at all."""
    optimizer = training.optimizer
    before = [{name: group[name] for name in _MOVING if name in group} for group in optimizer.param_groups]
    with ExitStack() as stack:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            stack.callback(group.update, values)
            group.update({name: _zero_like(value) for name, value in values.items()})
        if not step:
            stack.callback(_without_steps(optimizer))
        yield


def _without_steps(optimizer: Optimizer) -> Undo:
    """Let every way to step do nothing."""
    optimizer.step = lambda *_: None
    steps = parameter_steps(optimizer) if why_not_one_by_one(optimizer) is None else None
    function = steps.function if steps else None
    if steps:
        steps.function = lambda *_: None

    def undo() -> None:
        del optimizer.__dict__["step"]
        if steps and function:
            steps.function = function

    return undo


_MOVING = ("lr", "weight_decay")


def _zero_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0


@torch.no_grad()
def _forget_steps(optimizer: Optimizer) -> None:
    """The first real step is the first: counts are zero again, as the states still are."""
    for state in optimizer.state.values():
        for part in [state, *(piece.state for value in state.values() for piece in _pieces(value))]:
            step = part.get("step")
            if isinstance(step, Tensor):
                step.zero_()
            elif step is not None:
                part["step"] = 0


def _pieces(value: Any) -> list[Piece]:
    """Of a parameter whose states are divided between GPU and host."""
    return [piece for piece in value if isinstance(piece, Piece)] if isinstance(value, list) else []

"""The proof that a fitted model's losses and gradients are the plain model's, on one batch.

Both run with the same random numbers. Each gradient leaves the device as it is made: all of its elements where there are
few, an even sample of them where there are many. So neither run needs room for all gradients, and the plain one goes row
by row where rows do not mix. Nothing is stepped.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.errors import TonnageError
from tonnage.fit.measure.measuring import undisturbed
from tonnage.fit.stepping.batches import Part, batch_rows, split
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.micro_batches import find_weighting, why_rows_mix
from tonnage.fit.training import Batch, Training

if TYPE_CHECKING:
    from tonnage.fit.fitted import Fitted

_SAMPLED = 1 << 20  # elements of a parameter that are compared one by one
# How far gradients may differ, as a share of their norm: sums in another order, or in BF16.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_LOSS_TOLERANCE = 1e-6  # many models make theirs in FP32 whatever their own type
_HINT = "Please report this model to us."


class NotTheSame(TonnageError, AssertionError):
    """The loss or a gradient under fit is not the plain model's."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    loss: float
    plain_loss: float
    worst_parameter: str
    worst_error: float  # of a gradient, as a share of its norm
    parameters: int
    tolerance: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.6f}, plain {self.plain_loss:.6f}; {self.parameters} gradients compared, the worst "
            f"({self.worst_parameter}) differs by {self.worst_error:.1e} of its norm, {self.tolerance:.0e} is rounding"
        )


def prove(fitted: "Fitted", batch: Batch) -> Proof:
    training = fitted.training
    loss, found = _gradients(training, _parts(training, batch))
    with fitted.plain():
        plain_loss, expected = _gradients(training, _plain_parts(training, batch))
    errors = {name: _error(found.get(name), gradient) for name, gradient in expected.items()}
    if training.ranks is not None:  # each has looked at its shards
        loss, plain_loss, errors = training.ranks.of_all(loss, plain_loss, errors)
    worst = max(errors, key=errors.__getitem__)
    narrowest = max(_TOLERANCES[gradient.dtype] for gradient in _narrow(training))
    proof = Proof(
        loss=loss,
        plain_loss=plain_loss,
        worst_parameter=worst,
        worst_error=errors[worst],
        parameters=len(errors),
        tolerance=narrowest,
    )
    if not abs(loss - plain_loss) <= max(narrowest, _LOSS_TOLERANCE) * abs(plain_loss):
        raise NotTheSame(f"The loss under fit is not the plain model's: {proof}.", hint=_HINT)
    if not errors[worst] <= narrowest:
        raise NotTheSame(f"Gradients under fit are not the plain model's: {proof}.", hint=_HINT)
    return proof


def _parts(training: Training, batch: Batch) -> list[Part]:
    if training.ranks is not None:
        return training.ranks.divide(training, batch)
    return split(batch, training.micro_batches, training.weighting)


def _plain_parts(training: Training, batch: Batch) -> list[Part]:
    """Row by row where their losses make up the whole; else, and where ranks go together, as fit divides it."""
    if training.ranks is not None:
        return _parts(training, batch)
    divided = "micro-batches" in training.applied
    with suppress(NotApplicable):
        if why_rows_mix(training.model) is None:
            return split(batch, batch_rows(batch), training.weighting if divided else find_weighting(training))
    return split(batch, training.micro_batches, training.weighting)


def _narrow(training: Training) -> Iterator[Tensor]:
    """A number of each type that sums are made in: the parameters', and autocast's."""
    yield from (parameter.new_zeros(()) for parameter in training.model.parameters() if parameter.requires_grad)
    if "autocast" in training.applied:
        yield torch.zeros((), dtype=torch.bfloat16)


def _error(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return math.inf
    norm = expected.norm()
    return float((found - expected).norm() / norm) if norm > 0 else float(found.norm())


def _gradients(training: Training, parts: Sequence[Part]) -> tuple[float, dict[str, Tensor]]:
    """The loss of the batch in its parts, and of each gradient a sample in FP64 on the host."""
    total = 0.0
    with undisturbed(training.model, training.device), _sampled(training.model) as samples:
        torch.manual_seed(0)
        for part in parts:
            with training.forward_pass():
                loss = part.weigh(training.loss(training.model, part.batch))
            loss.backward()
            total += float(loss.detach())
    return total, samples


def _held_here(gradient: Tensor) -> Tensor:
    """Of a sharded one, this rank's shard."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@contextmanager
def _sampled(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Gradients leave as they are made; those that were there are back afterwards."""
    samples: dict[str, Tensor] = {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.grad for name, parameter in trained.items()}
    handles = []
    for name, parameter in trained.items():
        parameter.grad = None

        def take(parameter: Tensor, name: str = name) -> None:
            if parameter.grad is None:  # its last function took it and gave no gradient
                return
            flat = _held_here(parameter.grad).flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLED)].double().cpu()
            samples[name] = samples[name] + sample if name in samples else sample
            parameter.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(take))
    try:
        yield samples
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in trained.items():
            parameter.grad = before[name]

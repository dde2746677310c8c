"""Prove that a fitted model's losses and gradients are the plain model's, on one batch.

Both run with the same random numbers: the fitted model in its micro-batches, the plain one on the whole batch. If
that does not fit, both run on fewer rows. Nothing is stepped, and nothing changes.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tonnage.errors import TonnageError
from tonnage.fit.gradients import Samples, differences, global_norm, gradients_of, noted_autocast, rounding
from tonnage.fit.modules import eagerly, kept_modes, undisturbed
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.stepping.batches import MicroBatch, batch_rows, split, take_rows
from tonnage.fit.training import Batch, Training

_ELEMENTS = 1 << 20  # compared per parameter at most
_LEAST_TOLERANCE = 1e-6  # many models compute their loss in FP32 whatever their own dtype
_HINT = "Please report this model to us."


class NotTheSame(TonnageError, AssertionError):
    """The loss or a gradient under fit differs from the plain model's."""


class NotProven(TonnageError, RuntimeError):
    """The plain model does not fit the card even with the fewest rows that could prove anything."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    loss: float
    plain_loss: float
    worst_parameter: str
    worst_error: float  # of a gradient, relative to its norm
    parameters: int
    tolerance: float
    rows: int  # rows that both ran on

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.6f}, plain {self.plain_loss:.6f}; {self.parameters} gradients of {self.rows} rows compared, "
            f"the worst ({self.worst_parameter}) differs by {self.worst_error:.1e} of its norm, {self.tolerance:.0e} is rounding"
        )


def prove(
    training: Training,
    plain: Callable[[], AbstractContextManager[None]],
    batch: Batch,
    *,
    most_rows: int | None = None,
    compiled: bool = True,
) -> Proof:
    """Compare gradients and raise NotTheSame if one differs by more than rounding.

    Inside `plain()` the model is the plain one. `most_rows` is the number of rows that it has room for. Without
    `compiled`, compiled blocks run eagerly.
    """
    narrow: list[torch.dtype] = []
    # If micro-batches sample their own dropout, compare without dropout.
    with (
        kept_modes(training.model, evaluating=training.resampled),
        noted_autocast(training, narrow),
        nullcontext() if compiled else eagerly(),
    ):
        with plain(), as_before(training.loss, training.model):
            batch, plain_loss, expected = _plain_gradients(training, batch, most_rows)
        with as_before(training.loss, training.model):
            loss, found = _gradients(training, _parts(training, batch))
    errors, norm = differences(found, expected), global_norm(expected)
    if training.ranks is not None:  # each rank has compared its shards
        loss, plain_loss, errors = training.ranks.of_all(loss, plain_loss, errors)
    worst = max(errors, key=errors.__getitem__)
    proof = Proof(
        loss=loss,
        plain_loss=plain_loss,
        worst_parameter=worst,
        worst_error=errors[worst],
        parameters=len(errors),
        tolerance=max(
            rounding(training, narrow[0] if narrow else None, compiled=compiled and "compile" in training.applied),
            _LEAST_TOLERANCE,
        ),
        rows=batch_rows(batch),
    )
    if not math.isfinite(norm) or not math.isfinite(plain_loss):
        raise NotProven(f"The plain model's own gradients are not finite: {proof}.", hint="Prove it on another batch.")
    if not abs(loss - plain_loss) <= proof.tolerance * abs(plain_loss):
        raise NotTheSame(f"The loss under fit is not the plain model's: {proof}.", hint=_HINT)
    if not errors[worst] <= proof.tolerance:
        raise NotTheSame(f"Gradients under fit are not the plain model's: {proof}.", hint=_HINT)
    return proof


def _plain_gradients(training: Training, batch: Batch, most_rows: int | None) -> tuple[Batch, float, Samples]:
    """Run on as many rows as fit; if fit divides the batch, on at least two."""
    if training.ranks is not None:
        return batch, *_gradients(training, _parts(training, batch))
    fewest = 2 if training.micro_batches > 1 else 1
    rows = batch_rows(batch)
    size = rows if most_rows is None else max(fewest, min(rows, most_rows))
    while True:
        part = batch if size == rows else take_rows(batch, slice(0, size))
        try:
            return part, *_gradients(training, [MicroBatch(part, 1.0)])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size <= fewest:
                raise NotProven(
                    f"The plain model does not fit this card with {size} rows, so nothing can be compared.",
                    hint="Prove it with a shorter sequence: fitted.prove(batch).",
                ) from None
            size = max(fewest, size // 2)


def _parts(training: Training, batch: Batch) -> list[MicroBatch]:
    if training.ranks is not None:
        return training.ranks.divide(training, batch)
    # Fewer rows than a step has are divided into fewer parts of the same size, but at least two.
    part_rows = -(-batch_rows(training.sample) // training.micro_batches)
    parts = -(-batch_rows(batch) // part_rows)
    return split(batch, max(parts, min(2, training.micro_batches)), training.weighting)


def _gradients(training: Training, parts: list[MicroBatch]) -> tuple[float, Samples]:
    with undisturbed(training.model, training.device):
        torch.manual_seed(0)
        return gradients_of(training, parts, elements=_ELEMENTS)

"""Prove that a fitted model's losses and gradients are the plain model's, on one batch.

Both run with the same random numbers: the fitted model in its micro-batches, the plain one on the whole batch. If
that does not fit, both run on fewer rows. Nothing is stepped, and nothing changes.

Autocast rounds every number, FP8 much more, and with depth that becomes more than a mistake in another technique would. So
the plain model runs under the same autocast, how far that is from the plain model without is bounded apart, and FP8 is off.
"""

import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch

from tonnage.errors import TonnageError
from tonnage.fit.applied import Applied
from tonnage.fit.gradients import Samples, differences, global_norm, gradients_of, noted_autocast, rounding
from tonnage.fit.modules import eagerly, kept_modes, undisturbed
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.stepping.batches import MicroBatch, batch_rows, split, take_rows
from tonnage.fit.survey.measuring import parameter_bytes
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.technique import Changes, Technique
from tonnage.fit.training import Batch, Training
from tonnage.units import format_bytes

_ELEMENTS = 1 << 20  # compared per parameter at most
_LEAST_TOLERANCE = 1e-6  # many models compute their loss in FP32 whatever their own dtype
# How far autocast may move gradients. On an H200 it moves those of a Llama of 1B parameters by 0.04, of 15B by 0.17.
_NARROWING = 0.5
_ROOM_FOR_WEIGHTS = 0.9  # of what is free: a forward pass needs some too
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
    narrowing: float | None = None  # what autocast, which the plain model had too, changes in a gradient at most
    off: tuple[str, ...] = ()  # techniques that change the numerics, and did not run

    @property
    def beside(self) -> str:
        """What it does not cover."""
        words = []
        if self.narrowing:  # none if BF16 parameters with FP32 masters have narrowed everything before
            words.append(f"autocast itself, which both had, changes them by {self.narrowing:.0e} at most")
        if self.off:
            words.append(f"{', '.join(self.off)} was off, as it changes the numerics")
        return "; ".join(words)

    def __str__(self) -> str:
        beside = f"; {self.beside}" if self.beside else ""
        return (
            f"loss {self.loss:.6f}, plain {self.plain_loss:.6f}; {self.parameters} gradients of {self.rows} rows compared, "
            f"the worst ({self.worst_parameter}) differs by {self.worst_error:.1e} of its norm, "
            f"{self.tolerance:.0e} is rounding{beside}"
        )


def prove(
    applied: Applied,
    batch: Batch,
    *,
    most_rows: int | None = None,
    least_rows: int = 1,
    compiled: bool = True,
    elements: int = _ELEMENTS,
) -> Proof:
    """Compare gradients and raise NotTheSame if one differs by more than rounding.

    `most_rows` is the number of rows that the plain model has room for; below `least_rows` the batch is not cut.
    Without `compiled`, compiled blocks run eagerly. At most `elements` of each gradient are compared.
    """
    training = applied.training
    _check_room_for_weights(applied)
    off = tuple(technique.name for technique in applied.on_model if technique.changes is Changes.NUMERICS)
    compiled = compiled and not off  # other code would have to be compiled
    narrow: list[torch.dtype] = []
    # If micro-batches sample their own dropout, compare without dropout.
    with (
        kept_modes(training.model, evaluating=training.resampled),
        noted_autocast(training, narrow),
        nullcontext() if compiled else eagerly(),
    ):
        plain = _run_plain(applied, batch, most_rows, least_rows, elements)
        with applied.only(lambda technique: technique.name not in off) if off else nullcontext():
            found = _gradients(training, _parts(training, plain.batch), elements)
    loss, plain_loss, errors = _compare(training, found, plain.gradients)
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
        rows=batch_rows(plain.batch),
        narrowing=plain.narrowing,
        off=off,
    )
    if not plain.finite:
        raise NotProven(f"The plain model's own gradients are not finite: {proof}.", hint="Prove it on another batch.")
    if proof.narrowing is not None and not proof.narrowing <= _NARROWING:
        raise NotTheSame(
            f"Autocast changes gradients by more than {_NARROWING:.0%} of their norm: {proof}.",
            hint='Leave it out: without=("autocast",).',
        )
    if not abs(loss - plain_loss) <= proof.tolerance * abs(plain_loss):
        raise NotTheSame(f"The loss under fit is not the plain model's: {proof}.", hint=_HINT)
    if not errors[worst] <= proof.tolerance:
        raise NotTheSame(f"Gradients under fit are not the plain model's: {proof}.", hint=_HINT)
    return proof


@dataclass(frozen=True)
class _Plain:
    """What the plain model gave, under the autocast that was applied."""

    batch: Batch  # as many rows as fit
    gradients: tuple[float, Samples]
    finite: bool  # without autocast
    narrowing: float | None  # what autocast changes


def _check_room_for_weights(applied: Applied) -> None:
    """Raise NotProven if weights that are kept off the card do not fit it: the plain model needs all of them there."""
    device = applied.training.device
    if device.type != "cuda" or not any(_moves_weights(technique) for technique in applied.techniques):
        return
    weights_bytes = parameter_bytes(applied.training.model.parameters())
    free_bytes = GpuMeter(device).free_bytes()
    if weights_bytes > _ROOM_FOR_WEIGHTS * free_bytes:
        raise NotProven(
            f"The plain model's weights take {format_bytes(weights_bytes)}, and the card has {format_bytes(free_bytes)}, "
            "so nothing can be compared.",
            hint="Prove the same plan with a smaller model of the same kind.",
        )


def _moves_weights(technique: Technique) -> bool:
    return technique.name == "weight-streaming" or getattr(technique, "what", "") == "weights"


def _run_plain(applied: Applied, batch: Batch, most_rows: int | None, least_rows: int, elements: int) -> _Plain:
    """Run on as many rows as fit; if fit divides the batch, on at least two."""
    training = applied.training

    def run(batch: Batch, parts: list[MicroBatch]) -> _Plain:
        with applied.only(lambda technique: False), ExitStack() as stack:
            plain = _gradients(training, parts, elements)
            finite = math.isfinite(plain[0]) and math.isfinite(global_norm(plain[1]))
            autocast = next((technique for technique in applied.on_model if technique.name == "autocast"), None)
            if autocast is None:
                return _Plain(batch, plain, finite, None)
            stack.callback(autocast.place_again(training))
            narrowed = _gradients(training, parts, elements)
        loss, plain_loss, errors = _compare(training, narrowed, plain)
        return _Plain(batch, narrowed, finite, max(abs(loss - plain_loss) / (abs(plain_loss) or 1), *errors.values()))

    if training.ranks is not None:
        return run(batch, _parts(training, batch))
    fewest = max(least_rows, 2 if training.micro_batches > 1 else 1)
    rows = batch_rows(batch)
    size = rows if most_rows is None else max(fewest, min(rows, most_rows))
    while True:
        part = batch if size == rows else take_rows(batch, slice(0, size))
        try:
            return run(part, [MicroBatch(part, 1.0)])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size <= fewest:
                raise NotProven(
                    f"The plain model does not fit this card with {size} rows, so nothing can be compared.",
                    hint="Prove it with a shorter sequence: fitted.prove(batch).",
                ) from None
            size = max(fewest, size // 2)


def _compare(
    training: Training, found: tuple[float, Samples], expected: tuple[float, Samples]
) -> tuple[float, float, dict[str, float]]:
    """Return both losses, and by how much each gradient differs."""
    (loss, samples), (expected_loss, expected_samples) = found, expected
    errors = differences(samples, expected_samples)
    if training.ranks is None:
        return loss, expected_loss, errors
    return training.ranks.of_all(loss, expected_loss, errors)  # each rank has compared its shards


def _parts(training: Training, batch: Batch) -> list[MicroBatch]:
    if training.ranks is not None:
        return training.ranks.divide(training, batch)
    # Fewer rows than a step has are divided into fewer parts of the same size, but at least two.
    part_rows = -(-batch_rows(training.sample) // training.micro_batches)
    parts = -(-batch_rows(batch) // part_rows)
    return split(batch, max(parts, min(2, training.micro_batches)), training.weighting)


def _gradients(training: Training, parts: list[MicroBatch], elements: int) -> tuple[float, Samples]:
    with undisturbed(training.model, training.device), as_before(training.loss, training.model):
        torch.manual_seed(0)
        return gradients_of(training, parts, elements=elements)

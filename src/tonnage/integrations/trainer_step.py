"""One optimizer step of a fitted Hugging Face Trainer: its batches are combined and computed in micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tonnage.errors import RequestError
from tonnage.fit.stepping.backward_stepper import BackwardStepper
from tonnage.fit.stepping.batches import MicroBatch, batch_rows, split
from tonnage.fit.stepping.step import accumulate
from tonnage.fit.training import Training
from tonnage.integrations.fit_options import shared_out

Inputs = Mapping[str, Any]
ITEMS = "num_items_in_batch"  # what the Trainer divides a sum of losses by


class TrainerStep:
    """Collects the batches of an optimizer step until the last one arrives, then computes all of them."""

    def __init__(self, trainer: Any, training: Training, *, joins: bool) -> None:
        self._trainer, self._training, self._joins = trainer, training, joins
        self._rows = -(-batch_rows(training.sample) // training.micro_batches)
        self._waiting: list[Inputs] = []
        self._computed = False
        # The Trainer takes the norm before the step and reads it afterwards, so it is filled in between.
        self.gradient_norm = torch.zeros((), device=trainer.args.device)

    @property
    def keeps_gradients(self) -> bool:
        return not isinstance(self._training.stepper, BackwardStepper)

    def take(self, inputs: Inputs, items: Tensor | int | None) -> Tensor:
        """Add a batch; return the step's loss with the last batch, zero before."""
        self._waiting.append(inputs)
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros((), device=self._trainer.args.device)
        # Batches of an interrupted step do not count.
        batches = self._waiting[-self._trainer.current_gradient_accumulation_steps :]
        self._waiting = []
        parts = self._parts(batches, items)
        self._check_parts(parts)
        self._training.stepper.begin(len(parts))
        loss = accumulate(self._training, parts)
        self._computed = True
        return loss

    def finish(self) -> None:
        if not self._computed:
            raise RequestError(
                f"{type(self._trainer).__name__} has a training_step of its own that does not call "
                "super().training_step, so that fit saw no batch of this step.",
                hint="Call super().training_step there, or use tonnage.fit in a loop of your own.",
            )
        self._computed = False
        self._training.stepper.finish()
        norm = self._training.stepper.gradient_norm
        if norm is not None:
            self.gradient_norm.copy_(norm)

    def _parts(self, batches: list[Inputs], items: Tensor | int | None) -> list[MicroBatch]:
        joined = join(batches) if self._joins else None
        groups = batches if joined is None else [joined]
        # One batch's share of the step's loss, as in the Trainer: a loss that got the item count is already scaled.
        told = self._trainer.model_accepts_loss_kwargs and items is not None
        share = 1.0 if told or self._trainer.compute_loss_func is not None else 1 / len(batches)
        parts: list[MicroBatch] = []
        for group in groups:
            count = -(-batch_rows(group) // self._rows)
            parts += shared_out(split(with_items(group, items), count, self._training.weighting), share)
        return parts

    def _check_parts(self, parts: list[MicroBatch]) -> None:
        if len(parts) > 1 and not self._training.stepper.accumulates:
            raise RequestError(
                f"This step needs {len(parts)} backward passes (its batches are longer or of other shapes than the sample), "
                "and step-in-backward can take one.",
                hint='Pad all batches to one length, or fit_trainer(..., without=("step-in-backward",)).',
            )


def join(batches: Sequence[Inputs]) -> dict[str, Any] | None:
    """Concatenate batches, or return None if they differ in more than their number of rows."""
    if any(set(batch) != set(batches[0]) for batch in batches):
        return None
    columns = {name: [batch[name] for batch in batches] for name in batches[0]}
    rows = [batch_rows(batch) for batch in batches]
    if not all(_joinable(values, rows) for values in columns.values()):
        return None
    return {name: torch.cat(values) if isinstance(values[0], Tensor) else values[0] for name, values in columns.items()}


def _joinable(values: list[Any], rows: list[int]) -> bool:
    if not all(isinstance(value, Tensor) for value in values):
        return not any(isinstance(value, Tensor) or value != values[0] for value in values)
    whole = all(value.ndim and len(value) == count for value, count in zip(values, rows, strict=True))
    return whole and len({value.shape[1:] for value in values}) == 1


def with_items(batch: Inputs, items: Tensor | int | None) -> dict[str, Any]:
    return dict(batch) if items is None else {**batch, ITEMS: items}

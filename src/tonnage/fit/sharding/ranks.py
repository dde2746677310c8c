"""One optimizer step that all ranks take together, each on its own batch, as one process would on all of them.

Ranks agree on the number of micro-batches and on how much each one's loss weighs. So batches may differ in rows and in
tokens, and a rank without one, or with one that has no rows, goes through the same motions on the sample with a weight of
zero: nobody waits for it. It does not know the techniques.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tonnage.fit.sharding.agreement import Agreement
from tonnage.fit.sharding.wrapping import reshard
from tonnage.fit.stepping.batches import (
    WEIGHTINGS,
    BadBatch,
    Part,
    Weighting,
    is_weighting,
    measure_of,
    split,
    take_rows,
    tensors,
)
from tonnage.fit.training import Batch, Training

RANKS = "ranks"  # a weighting of its own: every rank's loss counts the same, whatever its batch


class Ranks:
    """The ranks of a training. `weighting` says how much a rank's batch weighs among all."""

    def __init__(self, agreement: Agreement, weighting: Weighting) -> None:
        self.agreement, self.weighting = agreement, weighting

    def take_step(self, training: Training, batch: Batch) -> Tensor:
        """The loss of all ranks' batches, after the step."""
        total = self._step(training, batch)
        assert total is not None
        return total

    def follow(self, training: Training) -> bool:
        """Go through a step of others without a batch; whether there was one."""
        return self._step(training, None) is not None

    def _step(self, training: Training, batch: Batch | None) -> Tensor | None:
        with self.agreement.together():
            parts = self.divide(training, batch)
            if not parts:
                return None
            training.stepper.begin(len(parts))
            total = _accumulated(training, parts)
            training.stepper.finish()
            return self.agreement.sum(total) / self.agreement.size

    def of_all(
        self, loss: float, plain_loss: float, errors: Mapping[str, float]
    ) -> tuple[float, float, dict[str, float]]:
        """Two losses of this rank's parts as losses of all, and the largest error of any shard."""
        sums = self.agreement.sum(torch.tensor([loss, plain_loss], dtype=torch.float64)) / self.agreement.size
        worst = self.agreement.largest(*errors.values())
        return float(sums[0]), float(sums[1]), dict(zip(errors, worst, strict=True))

    def divide(self, training: Training, batch: Batch | None, *, least: int = 0) -> list[Part]:
        """As many parts on every rank, where one has a batch. Gradients are means over ranks: so are weights."""
        reshard(training.model)  # where a forward without a backward came before
        stepping, batch = batch is not None, None if batch is None or _is_empty(batch) else batch
        own = [] if batch is None else split(batch, training.micro_batches, training.weighting)
        count, any_steps = (int(number) for number in self.agreement.largest(len(own), stepping))
        if not any_steps:
            return []
        if not count:
            raise BadBatch("No rank's batch has any rows.", hint="Leave such a step out, on every rank.")
        count, share = max(count, least), self._share(training, batch)
        parts = [Part(part.batch, _finite(part.weight, training) * share) for part in own]
        spare = own[0].batch if own else take_rows(training.sample, slice(0, 1))
        return [*(Part(spare, 0.0) for _ in range(count - len(parts))), *parts]

    def _share(self, training: Training, batch: Batch | None) -> Tensor:
        """Of this rank's batch in all of them, times the number of ranks."""
        amount = self._amount(batch).to(training.device, torch.float64)
        if self.weighting == "sum":
            return amount * self.agreement.size
        return amount * self.agreement.size / self.agreement.sum(amount)

    def _amount(self, batch: Batch | None) -> Tensor:
        if batch is None:
            return torch.zeros((), dtype=torch.float64)
        measure = _measure(self.weighting)
        return torch.as_tensor(measure(batch), dtype=torch.float64)


def check_weighting(weighting: Weighting) -> str | None:
    """What is wrong with it, or None."""
    known = ("auto", RANKS, *WEIGHTINGS)
    if weighting not in known and not is_weighting(weighting):
        return f"{weighting!r} is no weighting; known are {', '.join(known)}, or a function."
    return None


def _is_empty(batch: Batch) -> bool:
    """Tensors, and no rows in any: what a loader gives a rank for which nothing is left."""
    rows = [tensor.shape[0] for tensor in tensors(batch) if tensor.ndim]
    return bool(rows) and not any(rows)


def _measure(weighting: Weighting) -> Callable[[Batch], Any]:
    return (lambda _: 1.0) if weighting in ("sum", RANKS) else measure_of(weighting)


def _finite(weight: float | Tensor, training: Training) -> Tensor:
    """A batch without any label has parts of no number; all of it weighs nothing."""
    return torch.as_tensor(weight, dtype=torch.float64, device=training.device).nan_to_num(0.0)


def _accumulated(training: Training, parts: list[Part]) -> Tensor:
    from tonnage.fit.stepping.step import accumulate  # which steps with ranks where there are any

    return accumulate(training, parts)

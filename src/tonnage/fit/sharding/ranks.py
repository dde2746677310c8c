"""One optimizer step that all ranks take together, each on its own batch, as one process would on all of them.

Ranks agree on the number of micro-batches and on the weight of each rank's loss. So batches may differ in rows and
tokens, and a rank with no batch or no rows runs the sample with weight zero, so that no other rank waits for it. It
does not know the techniques.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tonnage.fit.sharding.agreement import Agreement
from tonnage.fit.sharding.wrapping import reshard
from tonnage.fit.stepping.batches import BadBatch, MicroBatch, Weighting, measure_of, split, take_rows, tensors
from tonnage.fit.stepping.step import step_on
from tonnage.fit.training import Batch, Training

RANKS = "ranks"  # a weighting in which every rank's loss counts the same, whatever its batch


class Ranks:
    """The ranks of a training. `weighting` sets the weight of a rank's batch among all."""

    least_parts = 0  # into which a batch is divided

    def __init__(self, agreement: Agreement, weighting: Weighting) -> None:
        self.agreement, self.weighting = agreement, weighting

    def take_step(self, training: Training, batch: Batch) -> Tensor:
        """Take a step and return the loss over all ranks' batches."""
        total = self._step(training, batch)
        assert total is not None
        return total

    def follow(self, training: Training) -> bool:
        """Join a step of other ranks without a batch; return whether there was one."""
        return self._step(training, None) is not None

    def _step(self, training: Training, batch: Batch | None) -> Tensor | None:
        with self.agreement.together():
            parts = self.divide(training, batch)
            return self.agreement.sum(self.compute(training, parts)) / self.agreement.size if parts else None

    def compute(self, training: Training, parts: list[MicroBatch]) -> Tensor:
        """Take this rank's step and return its loss."""
        return step_on(training, parts)

    def of_all(
        self, loss: float, plain_loss: float, errors: Mapping[str, float]
    ) -> tuple[float, float, dict[str, float]]:
        """Return two losses averaged over all ranks, and the largest error of any shard."""
        sums = self.agreement.sum(torch.tensor([loss, plain_loss], dtype=torch.float64)) / self.agreement.size
        return float(sums[0]), float(sums[1]), dict(zip(errors, self.agreement.largest(*errors.values()), strict=True))

    def divide(self, training: Training, batch: Batch | None) -> list[MicroBatch]:
        """Divide into equally many parts on every rank. Gradients are averaged over ranks, and so are weights."""
        reshard(training.model)  # in case a forward without a backward came before
        stepping = batch is not None
        rows = [tensor.shape[0] for tensor in tensors(batch) if tensor.ndim]
        if rows and not any(rows):  # what a loader returns to a rank without data left
            batch = None
        own = [] if batch is None else split(batch, training.micro_batches, training.weighting)
        count, any_steps = (int(number) for number in self.agreement.largest(len(own), stepping))
        if not any_steps:
            return []
        if not count:
            raise BadBatch("No rank's batch has any rows.", hint="Leave such a step out, on every rank.")
        # This rank's share of all batches, times the number of ranks.
        alike = self.weighting in ("sum", RANKS)
        measured = 0.0 if batch is None else 1.0 if alike else measure_of(self.weighting)(batch)
        amount = torch.as_tensor(measured, dtype=torch.float64).to(training.device)
        share = amount * self.agreement.size
        if self.weighting != "sum":
            share = share / self.agreement.sum(amount)
        parts = []
        for part in own:
            # The parts of a batch without labels have NaN weights; all of it counts as zero.
            weight = torch.as_tensor(part.weight, dtype=torch.float64, device=training.device).nan_to_num(0.0)
            parts.append(MicroBatch(part.batch, weight * share))
        spare = own[0].batch if own else take_rows(training.sample, slice(0, 1))
        return [MicroBatch(spare, 0.0)] * (max(count, self.least_parts) - len(parts)) + parts

"""Take one optimizer step on one batch, micro-batch by micro-batch. It does not know which techniques apply."""

from collections.abc import Sequence

from torch import Tensor

from tonnage.fit.stepping.batches import MicroBatch, split
from tonnage.fit.training import Batch, Training


def take_step(training: Training, batch: Batch) -> Tensor:
    """Take a step and return the loss of the whole batch. If anything raises, gradients are restored."""
    if training.ranks is not None:
        return training.ranks.take_step(training, batch)
    return step_on(training, split(batch, training.micro_batches, training.weighting))


def step_on(training: Training, parts: Sequence[MicroBatch]) -> Tensor:
    """Take a step on a batch that is divided already."""
    training.stepper.begin(len(parts))
    total = accumulate(training, parts)
    training.stepper.finish()
    return total


def accumulate(training: Training, parts: Sequence[MicroBatch], *, closes: bool = True) -> Tensor:
    """Run forward and backward of these parts and return their total loss; `closes`: the last ends the step."""
    total: Tensor | None = None
    try:
        for index, part in enumerate(parts):
            with training.forward_pass():
                loss = part.weigh(training.loss(training.model, part.batch))
            training.stepper.backward(loss, last=closes and index == len(parts) - 1)
            total = loss.detach() if total is None else total + loss.detach()
            del loss
    except BaseException:
        training.stepper.abandon()
        raise
    assert total is not None
    return total

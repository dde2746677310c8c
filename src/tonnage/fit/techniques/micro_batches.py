"""Micro-batches: run a batch in parts whose gradients add up to those of the whole.

Activations shrink with the part; parameters, gradients and states do not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from tonnage.fit.modules import active_dropout
from tonnage.fit.stepping.batches import WEIGHTINGS, BadBatch, Weighting, batch_rows, is_weighting
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, set_attributes
from tonnage.fit.weighting import find_weighting


class MicroBatches(Technique, name="micro-batches"):
    """Divides a batch into `count` parts; `dropout="resampled"` lets each part sample its own masks.

    `weighting` is one of `batches.WEIGHTINGS`, a function, or "auto".
    """

    count: int
    weighting: Weighting = "auto"
    dropout: str = "same"

    def why_not(self, training: Training) -> str | None:
        wrong = self.why_not_settings()
        if wrong is not None:
            return wrong
        try:
            rows = batch_rows(training.sample)
        except BadBatch as problem:
            return str(problem)
        if rows < self.count:
            return f"The sample has {rows} rows; {self.count} micro-batches need at least as many."
        if not training.stepper.accumulates:
            return "The way steps are taken here cannot accumulate gradients over several micro-batches."
        # A user's hook would run after each part, on an incomplete gradient; ours and torch's handle parts.
        for name, parameter in training.model.named_parameters():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                made_in = getattr(getattr(hook, "func", hook), "__module__", None) or ""
                if not made_in.startswith(("tonnage.", "torch.")):
                    return f"{name} has a hook on its accumulated gradient, which would run after each micro-batch."
        # A row's result may depend on the other rows of its batch.
        for name, module in training.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                return f"{name} normalises over the batch, and its statistics would be those of a micro-batch."
        dropped = None if self.dropout == "resampled" else active_dropout(training.model)
        if dropped:
            return (
                f"{dropped} drops at random, and a micro-batch draws other numbers than its rows of the whole batch: "
                'equal in distribution, not in value. dropout="resampled" accepts that.'
            )
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        weighting, resampled = self.weighting, self.dropout == "resampled"
        if weighting == "auto" and training.ranks is not None:
            # Found when the model was sharded, on the same sample for all.
            weighting = "rows" if training.ranks.weighting == "ranks" else training.ranks.weighting
        elif weighting == "auto":
            weighting = find_weighting(training, resampled=resampled)
        # What keeps a distributed wrapper from reducing incomplete gradients.
        model: Any = training.model
        if hasattr(model, "no_sync"):  # DistributedDataParallel, FullyShardedDataParallel
            stack.callback(training.replace_stepper(SyncedOnce(training.stepper, model.no_sync)))
        elif hasattr(model, "set_requires_gradient_sync"):  # fully_shard
            stack.callback(training.replace_stepper(SyncedOnce(training.stepper, partial(_gradients_unsynced, model))))
        stack.callback(set_attributes(training, micro_batches=self.count, weighting=weighting, resampled=resampled))

    def why_not_settings(self) -> str | None:
        """Return what is wrong with the settings themselves, or None."""
        if self.count < 1:
            return f"A batch cannot be divided into {self.count} micro-batches."
        if self.weighting != "auto" and not is_weighting(self.weighting):
            return f"{self.weighting!r} is no weighting; known are auto, {', '.join(WEIGHTINGS)}, or a function."
        if self.dropout not in ("same", "resampled"):
            return f'dropout= takes "same" or "resampled", not {self.dropout!r}.'
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings for JSON; a function cannot be stored and must be passed again."""
        return super().settings() | ({"weighting": "auto"} if callable(self.weighting) else {})


@contextmanager
def _gradients_unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class SyncedOnce(Stepper):
    """Wraps a stepper so that gradients are reduced between processes only in the last micro-batch.

    DistributedDataParallel decides in forward, so the context closes before the last micro-batch's forward.
    """

    def __init__(self, inner: Stepper, unsynchronised: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(inner.optimizer, clip_norm=inner.clip_norm)
        self.inner = inner
        self.accumulates = inner.accumulates
        self._unsynchronised = unsynchronised
        self._open = ExitStack()
        self._parts_left = 0

    def begin(self, micro_batches: int) -> None:
        self._parts_left = micro_batches
        self.inner.begin(micro_batches)
        if micro_batches > 1:
            self._open.enter_context(self._unsynchronised())

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.inner.backward(loss, last=last)
        self._parts_left -= 1
        if self._parts_left == 1:
            self._open.close()

    def finish(self) -> None:
        self.inner.finish()
        self.gradient_norm = self.inner.gradient_norm

    def abandon(self) -> None:
        self._open.close()
        self.inner.abandon()

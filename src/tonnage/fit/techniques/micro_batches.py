"""Micro-batches: a batch in parts, one after the other, whose gradients add up to those of the whole.

Activations shrink with the part; parameters, gradients and states stay. How much a part's loss weighs is found out by
comparing the loss of two rows with the losses of each. It does not know how the gradients are kept or stepped.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tonnage.fit.measure.profile import Profile
from tonnage.fit.randomness import active_dropout
from tonnage.fit.stepping.batches import (
    IGNORED_LABEL,
    WEIGHTINGS,
    BadBatch,
    Weighting,
    batch_rows,
    find_labels,
    split,
    take_rows,
)
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Estimate, NotApplicable, Technique
from tonnage.fit.training import Batch, Training, Undo
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import format_bytes

LARGEST_ERROR = 0.01  # of a loss put together from its parts; BF16 alone makes about a tenth of it


@dataclass(frozen=True, kw_only=True)
class MicroBatches(Technique):
    """`weighting`: one of `batches.WEIGHTINGS`, a function, or "auto". `dropout="resampled"` lets each part draw anew."""

    name: ClassVar[str] = "micro-batches"
    title: ClassVar[str] = "micro-batches"
    order: ClassVar[int] = 90
    conflicts: ClassVar[dict[str, str]] = {
        "step-in-backward": "it steps and drops a gradient in each backward, so gradients of micro-batches never add up"
    }

    count: int
    weighting: Weighting = "auto"
    dropout: str = "same"

    def why_not(self, training: Training) -> str | None:
        return (
            _why_not_settings(self)
            or _why_not_rows(self, training)
            or _why_not_stepper(training)
            or why_rows_mix(training.model, resampled=self.dropout == "resampled")
        )

    def estimate(self, profile: Profile) -> Estimate:
        rows = -(-profile.batch_rows // self.count)
        fraction = rows / profile.micro_batch_rows
        held_bytes = sum(block.kept_bytes + block.input_bytes for block in profile.blocks) + profile.outside_kept_bytes
        highest_bytes = held_bytes + max(
            (profile.loss_peak_bytes, *(block.backward_peak_bytes for block in profile.blocks))
        )
        walked_bytes = profile.parameters_bytes + profile.gradients_bytes + profile.optimizer_bytes
        extra_parts = self.count - profile.batch_rows / profile.micro_batch_rows
        # Adding to a gradient reads two and writes one; the optimizer's own pass says how fast the card walks bytes.
        walks_s = extra_parts * 3 * profile.gradients_bytes * profile.optimizer_s / max(walked_bytes, 1)
        saved_bytes = round(highest_bytes * (1 - fraction))
        why = f"{format_bytes(highest_bytes)} of activations at {profile.micro_batch_rows} rows, now {rows}"
        return Estimate(saved_bytes=saved_bytes, seconds=walks_s, why=why)

    def apply(self, training: Training) -> Undo:
        reason = self.why_not(training)
        if reason:
            raise NotApplicable(reason, hint="Use a smaller count=, or leave micro-batches out.")
        weighting = self._found_weighting(training)
        before = training.micro_batches, training.weighting
        with ExitStack() as stack:
            unsynchronised = _no_sync(training.model)
            if unsynchronised is not None:
                stack.callback(training.replace_stepper(SyncedOnce(training.stepper, unsynchronised)))
            training.micro_batches, training.weighting = self.count, weighting
            stack.callback(_set_division, training, *before)
            return stack.pop_all().close

    def _found_weighting(self, training: Training) -> Weighting:
        if self.weighting != "auto":
            return self.weighting
        return find_weighting(training, resampled=self.dropout == "resampled")


def _set_division(training: Training, micro_batches: int, weighting: Weighting) -> None:
    training.micro_batches, training.weighting = micro_batches, weighting


def _why_not_settings(technique: MicroBatches) -> str | None:
    if technique.count < 1:
        return f"A batch cannot be divided into {technique.count} micro-batches."
    if isinstance(technique.weighting, str) and technique.weighting not in ("auto", *WEIGHTINGS):
        return f"{technique.weighting!r} is no weighting; known are auto, {', '.join(WEIGHTINGS)}, or a function."
    if technique.dropout not in ("same", "resampled"):
        return f'dropout= takes "same" or "resampled", not {technique.dropout!r}.'
    return None


def _why_not_rows(technique: MicroBatches, training: Training) -> str | None:
    try:
        rows = batch_rows(training.sample)
    except BadBatch as problem:
        return str(problem)
    if rows < technique.count:
        return f"The sample has {rows} rows; {technique.count} micro-batches need at least as many."
    return None


def _why_not_stepper(training: Training) -> str | None:
    if not training.stepper.accumulates:
        return "The way steps are taken here cannot accumulate gradients over several micro-batches."
    return None


def why_rows_mix(model: nn.Module, *, resampled: bool = False) -> str | None:
    """Why the rows of a batch are not the same alone, or None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{name} normalises over the batch, and its statistics would be those of a micro-batch."
    dropped = None if resampled else active_dropout(model)
    if dropped:
        return (
            f"{dropped} drops at random, and a micro-batch draws other numbers than its rows of the whole batch: "
            'equal in distribution, not in value. dropout="resampled" accepts that.'
        )
    return None


# How much a part weighs -----------------------------------------------------------------------------------------------


def find_weighting(training: Training, *, resampled: bool = False) -> Weighting:
    """The weighting under which the losses of two rows make up the loss of both; by its looks where values are none."""
    likely = likely_weighting(training.model, training.sample)
    if batch_rows(training.sample) < 2 or on_virtual_gpu(training.device):
        return likely
    rows = take_rows(training.sample, _most_unlike_rows(training.sample))
    with _without_traces(training, evaluating=resampled):
        whole, again = _loss(training, rows, seed=0), _loss(training, rows, seed=1)
        if whole == again:
            return _fitting_weighting(training, rows, whole, likely)
    if resampled:
        return likely
    raise NotApplicable(
        f"The loss of the same rows is {whole:.6g} and then {again:.6g}: it draws random numbers, and micro-batches "
        "draw others than the whole batch.",
        hint='Accept that with dropout="resampled", or leave micro-batches out.',
    )


def likely_weighting(model: nn.Module, batch: Batch) -> str:
    """By the names in the batch and the class of the model."""
    if hasattr(batch, "keys") and "num_items_in_batch" in batch:
        return "sum"
    labels = find_labels(batch)
    if labels is None or labels.ndim < 2:
        return "rows" if labels is None else "tokens"
    return "shifted-tokens" if _shifts_labels(model) else "tokens"


def _shifts_labels(model: nn.Module) -> bool:
    """transformers' causal models compare a position with the label after it; one may stand inside another module."""
    kinds = (f"{getattr(module, 'loss_type', '')} {type(module).__name__}" for module in model.modules())
    return any("ForCausalLM" in kind or "LMHead" in kind for kind in kinds)


def _fitting_weighting(training: Training, rows: Batch, whole: float, likely: str) -> str:
    losses = [_loss(training, part.batch, seed=0) for part in split(rows, 2)]
    known = WEIGHTINGS if find_labels(rows) is not None else ("rows", "sum")
    errors = {weighting: _error(rows, losses, whole, weighting) for weighting in known}
    best = min(errors, key=errors.__getitem__)
    # Rows of a fresh model lose nearly alike: rounding alone must not overrule what the batch looks like.
    chosen = likely if errors[likely] <= 10 * errors[best] else best
    if not errors[chosen] <= LARGEST_ERROR * abs(whole):
        parts = " and ".join(f"{loss:.6g}" for loss in losses)
        raise NotApplicable(
            f"Two rows lose {whole:.6g} together but {parts} each, and no known weighting makes the one of the others: "
            "the loss is no mean or sum over rows or tokens.",
            hint="Give weighting= a function that says how much a part of the batch weighs, or leave micro-batches out.",
        )
    return chosen


def _error(rows: Batch, losses: list[float], whole: float, weighting: str) -> float:
    parts = zip(split(rows, 2, weighting), losses, strict=True)
    error = abs(sum(float(part.weigh(torch.tensor(loss))) for part, loss in parts) - whole)
    return math.inf if math.isnan(error) else error


def _most_unlike_rows(batch: Batch) -> list[int]:
    """The rows with the fewest and the most labels, where weightings differ most; else the first two."""
    labels = find_labels(batch)
    if labels is None or labels.ndim < 2:
        return [0, 1]
    kept = (labels != IGNORED_LABEL).flatten(2).sum(2) if labels.ndim > 2 else labels != IGNORED_LABEL
    # Rows whose first label counts differ in "tokens" and "shifted-tokens"; a mean over none is no number.
    pairs = zip(kept[:, 1:].sum(1).tolist(), kept[:, 0].tolist(), strict=True)
    counted = [(*pair, row) for row, pair in enumerate(pairs) if pair[0]]
    fewest, most = min(counted, default=(0, 0, 0))[2], max(counted, default=(0, 0, 0))[2]
    return [fewest, most] if fewest != most else [0, 1]


def _loss(training: Training, batch: Batch, *, seed: int) -> float:
    torch.manual_seed(seed)
    with training.forward_pass():
        return float(training.loss(training.model, batch))


@contextmanager
def _without_traces(training: Training, *, evaluating: bool) -> Iterator[None]:
    """No gradients, no compilation for shapes seen only here, random numbers and modes as they were."""
    modes = {module: module.training for module in training.model.modules()}
    devices = [training.device] if training.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), _eager():
            if evaluating:
                training.model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _eager() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


# Distributed wrappers -------------------------------------------------------------------------------------------------


def _no_sync(model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    """What keeps a distributed wrapper from exchanging gradients that are not complete."""
    if hasattr(model, "no_sync"):  # DistributedDataParallel, FullyShardedDataParallel
        return model.no_sync
    if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
        return lambda: _gradients_unsynced(model)
    return None


@contextmanager
def _gradients_unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class SyncedOnce(Stepper):
    """Another stepper, with gradients exchanged between processes in the last micro-batch alone.

    DistributedDataParallel asks in forward whether to exchange: so the context opens with the step and closes before
    the last micro-batch's forward.
    """

    def __init__(self, inner: Stepper, unsynchronised: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(inner.optimizer, clip_norm=inner.clip_norm)
        self.inner = inner
        self.accumulates, self.clips = inner.accumulates, inner.clips
        self._unsynchronised = unsynchronised
        self._open = ExitStack()
        self._parts_left = 0

    def begin(self, micro_batches: int) -> None:
        self.micro_batches = self._parts_left = micro_batches
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

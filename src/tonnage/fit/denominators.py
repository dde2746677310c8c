"""Find what a mean of `cross_entropy` or `nll_loss` divides by: weights of classes, and an ignored label of its own.

Such a mean is divided by the sum of its targets' class weights, so neither rows nor labels say how much a part of a
batch weighs. The arguments of the calls tell, and are recorded while the loss runs once. This module does not know
whether the recorded mean is the whole loss: `fit.weighting` tries that on gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tonnage.fit.stepping.batches import IGNORED_LABEL, batch_rows, find_labels, named_tensor, named_tensors
from tonnage.fit.training import Batch

_SIGNATURES = {function: signature(function) for function in (functional.cross_entropy, functional.nll_loss)}


@dataclass(frozen=True, eq=False)
class TargetMean:
    """A mean over integer targets: the weight of each class, if any, and the target that is left out."""

    class_weights: Tensor | None
    ignored: int

    def is_like(self, other: "TargetMean") -> bool:
        if self.ignored != other.ignored or (self.class_weights is None) != (other.class_weights is None):
            return False
        if self.class_weights is None or other.class_weights is None:
            return True
        return self.class_weights is other.class_weights or torch.equal(self.class_weights, other.class_weights)


@dataclass
class LossCalls:
    """The losses over integer targets that were computed."""

    means: list[TargetMean] = field(default_factory=list)
    sums: int = 0
    unreduced: int = 0  # what is done with one loss per target is not known

    @property
    def ignored(self) -> set[int]:
        """The targets that a loss leaves out."""
        return {IGNORED_LABEL, *(mean.ignored for mean in self.means)}

    @property
    def explain_denominator(self) -> bool:
        """Whether each loss was reduced where its arguments are known."""
        return bool(self.means or self.sums) and not self.unreduced


class RecordedLosses(TorchFunctionMode):
    """Record the calls of `cross_entropy` and `nll_loss` inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = LossCalls()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            self._record(_SIGNATURES[func].bind(*args, **kwargs).arguments)
        return func(*args, **kwargs)

    def _record(self, arguments: dict[str, Any]) -> None:
        target = arguments.get("target")
        if not isinstance(target, Tensor) or target.is_floating_point():
            return  # probabilities: a mean over rows, whatever the weights
        reduction = arguments.get("reduction", "mean")
        is_legacy = arguments.get("size_average") is not None or arguments.get("reduce") is not None
        if reduction == "sum" and not is_legacy:
            self.calls.sums += 1
        elif reduction == "mean" and not is_legacy:
            mean = TargetMean(arguments.get("weight"), int(arguments.get("ignore_index", IGNORED_LABEL)))
            if not any(mean.is_like(other) for other in self.calls.means):
                self.calls.means.append(mean)
        else:
            self.calls.unreduced += 1


@dataclass(frozen=True, eq=False)
class TargetAmount:
    """A weighting: what a mean over the tensor at `path` divides by on this part of a batch."""

    mean: TargetMean
    path: str
    is_shifted: bool = False

    def __call__(self, part: Batch) -> Tensor:
        targets = named_tensor(part, self.path)
        if self.is_shifted:
            targets = targets[..., 1:]
        is_counted = targets != self.mean.ignored
        if self.mean.class_weights is None:
            return is_counted.sum().double()
        class_weights = self.mean.class_weights.detach().to(targets.device).double()
        classes = targets.long().clamp(0, len(class_weights) - 1)  # an ignored target may be no class
        return (class_weights[classes] * is_counted).sum()

    def __str__(self) -> str:
        what = "targets" if self.mean.class_weights is None else "class weights"
        return f"{what} of {self.path}{', shifted' if self.is_shifted else ''}"


def target_weightings(batch: Batch, means: Iterable[TargetMean]) -> Iterator[TargetAmount | str]:
    """Yield the weightings that these means suggest: by each tensor of the batch that may be their target."""
    rows = batch_rows(batch)
    labels = find_labels(batch)
    tensors = [(path, tensor) for path, tensor in named_tensors(batch) if tensor.ndim and tensor.shape[0] == rows]
    tensors.sort(key=lambda named: named[1] is not labels)
    for mean in means:
        if mean.class_weights is None and mean.ignored == IGNORED_LABEL:
            continue  # "tokens" says the same
        for path, tensor in tensors:
            if not _may_be_target(tensor, mean):
                continue
            if mean.class_weights is None and mean.ignored == 0:
                # The same by names, which a plan can hold.
                yield f"nonzero:{path}"
                if tensor.ndim > 1:
                    yield f"shifted-nonzero:{path}"
                continue
            yield TargetAmount(mean, path)
            if tensor.ndim > 1:
                yield TargetAmount(mean, path, is_shifted=True)


def _may_be_target(tensor: Tensor, mean: TargetMean) -> bool:
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        return False
    counted = tensor[tensor != mean.ignored]
    if not counted.numel():
        return True
    is_below = mean.class_weights is None or int(counted.max()) < len(mean.class_weights)
    return is_below and int(counted.min()) >= 0

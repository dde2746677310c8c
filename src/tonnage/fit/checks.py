"""Check a request to fit, before anything is changed."""

from collections.abc import Mapping
from inspect import signature
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tonnage.errors import RequestError
from tonnage.fit.stepping.batches import IGNORED_LABEL, find_labels, tensors
from tonnage.fit.training import Batch
from tonnage.fit.virtual import on_virtual_gpu

# Models that fit has changed and not yet restored.
FITTED: "WeakSet[nn.Module]" = WeakSet()


def check_request(model: Any, optimizer: Any, loss: Any, sample: Batch) -> torch.device:
    """Check the model, optimizer, loss and sample, and return their device."""
    check_model(model, optimizer)
    check_loss_function(loss, model, sample)
    device: torch.device = next(model.parameters()).device
    check_sample(sample, device)
    return device


def check_model(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "Give the model itself."
        if isinstance(model, Optimizer):
            hint = "The model comes first: tonnage.fit(model, optimizer, loss=..., sample=...)."
        raise RequestError(f"fit wants a torch.nn.Module, and got {_kind_of(model)}.", hint=hint)
    if isinstance(optimizer, GradScaler):
        raise RequestError(
            "fit wants a torch optimizer, and got a GradScaler.",
            hint="Give the optimizer that it steps. fit's own mixed precision is in BF16, which needs no scaling.",
        )
    if not isinstance(optimizer, Optimizer):
        hint = "Give the optimizer that steps the model: torch.optim.AdamW(model.parameters(), lr=...)."
        if isinstance(optimizer, LRScheduler):
            hint = "Give the optimizer, not a scheduler."
        raise RequestError(f"fit wants a torch optimizer, and got {_kind_of(optimizer)}.", hint=hint)
    if isinstance(optimizer, LBFGS):
        raise RequestError(
            "LBFGS runs forward and backward passes of its own within a step, which fit would not see.",
            hint="Use another optimizer, or train without fit.",
        )
    if model in FITTED:
        raise RequestError("This model is fitted already.", hint="Call undo() on what fit returned, then fit again.")
    if hasattr(model, "_orig_mod"):
        raise RequestError(
            "The model is compiled already: torch.compile has wrapped it, and traces whatever is changed inside.",
            hint="Give fit the module that was compiled, model._orig_mod, with the same optimizer: fit compiles its blocks.",
        )
    name = type(model).__name__
    if isinstance(model, DataParallel | DistributedDataParallel) or name.startswith("FSDP"):
        raise RequestError(
            f"The model is wrapped already ({name}), and what is inside cannot be changed safely.",
            hint="Give fit the plain module, and wrap it afterwards.",
        )
    owned = {id(parameter) for parameter in model.parameters()}
    if not owned:
        raise RequestError("The model has no parameters.", hint="Give the model that is to be trained.")
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if foreign:
        raise RequestError(
            f"The optimizer steps {len(foreign)} parameters that are not the model's.",
            hint="Make the optimizer from this model's parameters, after it was moved and wrapped.",
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RequestError(f"The model's parameters are spread over {names}.", hint="Put the model on one device.")


def _kind_of(value: Any) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_loss_function(loss: Any, model: nn.Module, sample: Batch) -> None:
    """Check that `loss(model, sample)` is a call that it takes."""
    hint = "Give a function of the model and a batch: loss=lambda model, batch: model(**batch).loss."
    if not callable(loss) or isinstance(loss, type):
        raise RequestError(f"loss= takes a function, and got {_kind_of(loss)}.", hint=hint)
    if isinstance(loss, nn.modules.loss._Loss):
        raise RequestError(
            f"loss= is called with the model and a batch, and {type(loss).__name__} takes outputs and targets.",
            hint="Wrap it: loss=lambda model, batch: criterion(model(batch[0]), batch[1]).",
        )
    try:
        arguments = signature(loss)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        arguments.bind(model, sample)
    except TypeError as problem:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise RequestError(
            f"loss= is called as loss(model, batch), and {name}{arguments} does not take that: {problem}.", hint=hint
        ) from None


def check_sample(sample: Batch, device: torch.device) -> None:
    found = list(tensors(sample))
    if not found:
        raise RequestError(
            f"The sample ({type(sample).__name__}) holds no tensor.",
            hint="Give one batch as the training loop sees it: next(iter(loader)).",
        )
    if not any(tensor.numel() for tensor in found):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found[:3])
        raise RequestError(f"The sample is empty: its tensors are of {shapes}.", hint="Give a batch with rows in it.")
    # Per-row integers may stay on the CPU beside GPU tensors, as `pack_padded_sequence` expects them.
    labels = find_labels(sample) if isinstance(sample, Mapping) else None
    whole = [t for t in found if t.ndim == 1 and not t.is_floating_point() and t.device.type == "cpu"]
    lengths = {id(t) for t in whole if t is not labels} if len(whole) < len(found) else set()
    away = next((t for t in found if t.device.type != device.type and id(t) not in lengths), None)
    if away is not None:
        raise RequestError(
            f"The sample is on {away.device} and the model on {device}.", hint="Move the sample to the model's device."
        )


def check_clip_norm(clip_norm: Any) -> None:
    number = isinstance(clip_norm, Real) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and clip_norm > 0):
        raise RequestError(
            f"clip_norm is {clip_norm!r}, and the norm to clip by is a number above 0.",
            hint="Leave it out not to clip. What clips by value goes into optimizer.register_step_pre_hook.",
        )


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise RequestError(f"The loss is not a scalar: {found}.", hint="Return the mean or the sum from loss=.")
    if not loss.requires_grad:
        raise RequestError(
            "The loss does not depend on the model's parameters.", hint="Is the model frozen, or under no_grad?"
        )


def check_steppable(loss: Any) -> None:
    """Check that a loss can be differentiated: like `check_loss`, but a tensor of one element is enough."""
    is_one_number = isinstance(loss, Tensor) and loss.numel() == 1
    if not is_one_number or not loss.requires_grad:
        check_loss(loss)


def check_finite(loss: Tensor, batch: Batch) -> None:
    """Raise if the loss is not finite: it would spread to the parameters. A mean over no labels (NaN) is allowed."""
    if on_virtual_gpu(loss.device) or bool(torch.isfinite(loss)):
        return
    labels = find_labels(batch)
    if labels is not None and bool((labels == IGNORED_LABEL).all()):
        return
    raise RequestError(
        f"The loss of the sample is {loss.item()}, and fit measures by taking steps on it.",
        hint="Look for infinite inputs, labels out of range, or a type too narrow for the loss; give a sample that trains.",
    )

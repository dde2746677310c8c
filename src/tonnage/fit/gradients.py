"""Collect the gradients of a training, and compare two sets of them. Nothing is stepped.

Each gradient leaves the device as soon as it is complete: whole if it is small, an even sample of its elements
otherwise. So they never all need room at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.fit.checks import check_steppable
from tonnage.fit.modules import find_blocks
from tonnage.fit.stepping.batches import MicroBatch
from tonnage.fit.training import Training

# A gradient is compared with its own norm plus this share of the global norm: where it is zero except for rounding (the
# bias of keys in attention), the rest is noise.
NOISE_SHARE = 0.002
# How far sums in another order may differ, by dtype.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
# Compiled code keeps in FP32 what eager code rounds after each operator. Gradients of an 8B Llama in BF16 differ by 0.13
# between the two, and eager ones differ from FP32's by 0.14, compiled ones by 0.12.
COMPILED = 4
Samples = dict[str, Tensor]


def gradients_of(training: Training, parts: Sequence[MicroBatch], *, elements: int) -> tuple[float, Samples]:
    """Return the loss over the parts of a batch, and up to `elements` of each gradient in FP64 on the host."""
    total = 0.0
    samples: Samples = {}

    def take(name: str, gradient: Tensor) -> None:
        if isinstance(gradient, DTensor):  # this rank's shard
            gradient = gradient.to_local()
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
        sample = flat[:: max(1, flat.numel() // elements)].double().cpu()
        samples[name] = samples[name] + sample if name in samples else sample

    with taken_gradients(training.model, take):
        for part in parts:
            with training.forward_pass():
                computed = training.loss(training.model, part.batch)
                check_steppable(computed)
                loss = part.weigh(computed)
            loss.backward()
            total += float(loss.detach())
    return total, samples


@contextmanager
def taken_gradients(module: nn.Module, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Pass each gradient to `take` as soon as it is complete and drop it; previous ones are restored."""

    def hand_over(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # its last function may have returned no gradient
            take(name, parameter.grad)
            parameter.grad = None

    with ExitStack() as stack:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(hand_over, name)).remove)
        yield


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each gradient's distance from the expected one relative to its norm."""
    norm_of_all = global_norm(expected)
    errors = {}
    for name, some in {**expected, **found}.items():
        wanted, got = (given[name] if name in given else torch.zeros_like(some) for given in (expected, found))
        scale = float(wanted.norm()) + NOISE_SHARE * norm_of_all
        apart = float((got - wanted).norm())
        error = apart / scale if scale else apart
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def global_norm(samples: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(sample.square().sum()) for sample in samples.values()))


def rounding(training: Training, narrow: torch.dtype | None = None, *, compiled: bool = False) -> float:
    """Return the tolerance for sums in another order; `narrow` is the dtype of the loss's own autocast.

    `compiled` says that compiled blocks are compared with eager ones.
    """
    types = {parameter.dtype for parameter in training.model.parameters() if parameter.requires_grad}
    types |= ({torch.bfloat16} if "autocast" in training.applied else set()) | ({narrow} if narrow else set())
    coarsest = max((ROUNDING.get(dtype, ROUNDING[torch.bfloat16]) for dtype in types), default=ROUNDING[torch.float32])
    if compiled and coarsest > ROUNDING[torch.float32]:
        coarsest *= COMPILED
    tf32 = training.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return max(coarsest, 1e-2) if tf32 and torch.float32 in types else coarsest


@contextmanager
def noted_autocast(training: Training, found: list[torch.dtype]) -> Iterator[None]:
    """Record the dtype of an autocast that the user's loss enters around the model."""
    kind = training.device.type

    def note(module: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled(kind) and not found:
            found.append(torch.get_autocast_dtype(kind))

    # The model's own forward may not be called (as in Lightning), and hooks inside blocks would break compiled graphs.
    blocks = tuple(f"{name}." for name in find_blocks(training.model))
    outside = [module for name, module in training.model.named_modules() if not name.startswith(blocks)]
    with ExitStack() as stack:
        for module in outside:
            stack.callback(module.register_forward_pre_hook(note).remove)
        yield

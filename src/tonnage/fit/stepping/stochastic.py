"""Adam, AdamW and SGD on BF16 parameters with BF16 states: computed in FP32, stored with stochastic rounding.

A value between two BF16 neighbours becomes the upper one with a probability that is its distance from the lower one,
so its expectation is kept. Rounding to nearest would lose every update smaller than half the spacing (1/256 of the
value), and a second moment could never decrease: 0.999 times a BF16 number is the same number.
"""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from tonnage.fit.stepping.parameter_step import Group, State, Step
from tonnage.fit.virtual import on_virtual_gpu

_CHUNK_ELEMENTS = 2**22  # 16 MiB per FP32 temporary, about eight at a time


def round_stochastically(values: Tensor) -> Tensor:
    """Round FP32 to BF16 stochastically, without bias. Non-finite values stay as they are."""
    noise = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device)
    # The upper half of an FP32 number is a BF16 number: a carry out of the lower half moves to the next magnitude.
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


class AdamStep(NamedTuple):
    """The scalars of one step, the same for all elements, in the order of the kernels' arguments."""

    average_gain: float  # 1 - beta1
    square_gain: float  # 1 - beta2
    size: float  # learning rate divided by the first bias correction
    root_scale: float  # 1 / sqrt(second bias correction)
    eps: float
    shrink: float  # factor of decoupled weight decay
    decay: float  # weight decay added to the gradient
    sign: float  # of the gradient: -1 to maximize

    @classmethod
    def of(cls, group: Group, step: int) -> "AdamStep":
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = bool(group.get("decoupled_weight_decay"))
        return cls(
            average_gain=1 - beta1,
            square_gain=1 - beta2,
            size=rate / (1 - beta1**step),
            root_scale=(1 - beta2**step) ** -0.5,
            eps=float(group["eps"]),
            shrink=1 - rate * decay if decoupled else 1.0,
            decay=0.0 if decoupled else decay,
            sign=-1.0 if group["maximize"] else 1.0,
        )


class SgdStep(NamedTuple):
    rate: float
    momentum: float
    gain: float  # weight of a new gradient in the momentum: 1 - dampening
    decay: float
    sign: float  # of the gradient: -1 to maximize
    nesterov: bool

    @classmethod
    def of(cls, group: Group) -> "SgdStep":
        rate, momentum, dampening, decay = (float(group[n]) for n in ("lr", "momentum", "dampening", "weight_decay"))
        sign = -1.0 if group["maximize"] else 1.0
        return cls(rate, momentum, 1 - dampening, decay, sign, bool(group["nesterov"]))


class StochasticStep(Step):
    """Steps BF16 parameters with stochastic rounding, others with the inner function."""

    def __init__(self, inner: Step) -> None:
        self._inner = inner

    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        step = stochastic_step if parameter.dtype == torch.bfloat16 else self._inner
        step(parameter, gradient, state, group)


@torch.no_grad()
def stochastic_step(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
    """Step one BF16 tensor as torch.optim's Adam, AdamW or SGD would, with the group's settings."""
    parameter, first = parameter.detach(), False
    numbers: AdamStep | SgdStep
    states: tuple[Tensor, ...]
    if "betas" in group:
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # A fused optimizer keeps it on the GPU; reading it on the host needs no synchronization.
        state["step"] = state["step"].cpu()
        state["step"] += 1
        numbers = AdamStep.of(group, max(1, int(state["step"].item())))
        states = state["exp_avg"], state["exp_avg_sq"]
    else:
        numbers = SgdStep.of(group)
        first = numbers.momentum != 0 and state.get("momentum_buffer") is None
        if first:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # Without momentum there is no state; the parameter stands in for a buffer that is never read.
        states = (state["momentum_buffer"] if numbers.momentum else parameter,)
    if on_virtual_gpu(parameter.device):
        return  # the kernel allocates nothing, and there are no values
    # One kernel on CUDA with Triton, if parameter and states are contiguous and BF16.
    tensors = (parameter, gradient, *states)
    narrow = all(tensor.dtype == torch.bfloat16 for tensor in (parameter, *states))
    if narrow and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors) and has_triton():
        from tonnage.fit.stepping import step_kernels

        step_kernels.step(parameter, gradient, states, numbers, first=first)
        return
    # Flat chunks, or the tensors themselves if not all are contiguous.
    chunks: Iterable[tuple[Tensor, ...]] = [tensors]
    if all(tensor.is_contiguous() for tensor in tensors):
        chunks = zip(*(tensor.view(-1).split(_CHUNK_ELEMENTS) for tensor in tensors), strict=True)
    for part, gradient_part, *state_parts in chunks:
        if isinstance(numbers, AdamStep):
            _step_adam(part, gradient_part, *state_parts, numbers=numbers)
        else:
            _step_sgd(part, gradient_part, *state_parts, numbers=numbers, first=first)


def _step_adam(part: Tensor, gradient: Tensor, average: Tensor, square: Tensor, *, numbers: AdamStep) -> None:
    value, slope = part.float(), gradient.float() * numbers.sign
    if numbers.decay:
        slope = slope.add(value, alpha=numbers.decay)
    first = average.float().lerp_(slope, numbers.average_gain)
    second = square.float().mul_(1 - numbers.square_gain).addcmul_(slope, slope, value=numbers.square_gain)
    divisor = second.sqrt().mul_(numbers.root_scale).add_(numbers.eps)
    value = (value * numbers.shrink).addcdiv_(first, divisor, value=-numbers.size)
    for target, exact in ((part, value), (average, first), (square, second)):
        _store(target, exact)


def _step_sgd(part: Tensor, gradient: Tensor, buffer: Tensor, *, numbers: SgdStep, first: bool) -> None:
    value = part.float()
    slope = (gradient.float() * numbers.sign).add_(value, alpha=numbers.decay)
    if numbers.momentum:
        mean = slope if first else buffer.float().mul_(numbers.momentum).add_(slope, alpha=numbers.gain)
        _store(buffer, mean)
        slope = slope.add(mean, alpha=numbers.momentum) if numbers.nesterov else mean
    _store(part, value.sub_(slope, alpha=numbers.rate))


def _store(target: Tensor, exact: Tensor) -> None:
    """Store into a state, which may be wider than the parameter if another step narrows it."""
    target.copy_(round_stochastically(exact) if target.dtype == torch.bfloat16 else exact)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None

"""Adam, AdamW and SGD on BF16 parameters with BF16 states: computed in FP32, stored with stochastic rounding.

A value between two BF16 neighbours becomes the upper one with a probability that is its distance from the lower one,
so its expectation is kept. Rounding to nearest would lose every update smaller than half the spacing (1/256 of the
value), and a second moment could never decrease: 0.999 times a BF16 number is the same number. It steps one
parameter, or a flat slice of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tonnage.fit.stepping.parameter_step import Group, State
from tonnage.fit.virtual import on_virtual_gpu

_CHUNK_ELEMENTS = 2**22  # 16 MiB per FP32 temporary, about eight at a time


def round_stochastically(values: Tensor) -> Tensor:
    """Round FP32 to BF16 stochastically, without bias. Non-finite values stay as they are."""
    noise = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device)
    # The upper half of an FP32 number is a BF16 number: a carry out of the lower half moves to the next magnitude.
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def stochastic_step(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
    """Step one BF16 tensor as torch.optim's Adam, AdamW or SGD would, with the group's settings."""
    with torch.no_grad():
        if "betas" in group:
            _step_adam(parameter.detach(), gradient, state, AdamStep.of(group, _count_step(parameter, state)))
        else:
            _step_sgd(parameter.detach(), gradient, state, SgdStep.of(group))


# Adam -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The scalars of one step, the same for all elements."""

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


def _count_step(parameter: Tensor, state: State) -> int:
    """Return this step's number. The count lives on the host, where reading it needs no synchronization."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if state["step"].is_cuda:  # a fused optimizer keeps it on the GPU
        state["step"] = state["step"].cpu()
    state["step"] += 1
    return max(1, int(state["step"].item()))


def _step_adam(parameter: Tensor, gradient: Tensor, state: State, numbers: AdamStep) -> None:
    tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
    if on_virtual_gpu(parameter.device):
        return  # the kernel allocates nothing, and there are no values
    if _fused(*tensors):
        from tonnage.fit.stepping.stochastic_kernels import adam

        adam(*tensors, numbers)
        return
    for part, gradient_part, average, square in _chunks(*tensors):
        value, slope = part.float(), gradient_part.float() * numbers.sign
        if numbers.decay:
            slope = slope.add(value, alpha=numbers.decay)
        first = average.float().lerp_(slope, numbers.average_gain)
        second = square.float().mul_(1 - numbers.square_gain).addcmul_(slope, slope, value=numbers.square_gain)
        divisor = second.sqrt().mul_(numbers.root_scale).add_(numbers.eps)
        value = (value * numbers.shrink).addcdiv_(first, divisor, value=-numbers.size)
        for target, exact in ((part, value), (average, first), (square, second)):
            _store(target, exact)


# SGD ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SgdStep:
    """The scalars of one step, the same for all elements."""

    rate: float
    momentum: float
    gain: float  # weight of a new gradient in the momentum: 1 - dampening
    nesterov: bool
    decay: float
    sign: float  # of the gradient: -1 to maximize

    @classmethod
    def of(cls, group: Group) -> "SgdStep":
        return cls(
            rate=float(group["lr"]),
            momentum=float(group["momentum"]),
            gain=1 - float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            decay=float(group["weight_decay"]),
            sign=-1.0 if group["maximize"] else 1.0,
        )


def _step_sgd(parameter: Tensor, gradient: Tensor, state: State, numbers: SgdStep) -> None:
    first = numbers.momentum != 0 and state.get("momentum_buffer") is None
    if first:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    # Without momentum there is no state; the parameter stands in for a buffer that is never read.
    buffer = state["momentum_buffer"] if numbers.momentum else parameter
    if on_virtual_gpu(parameter.device):
        return
    if _fused(parameter, gradient, buffer):
        from tonnage.fit.stepping.stochastic_kernels import sgd

        sgd(parameter, gradient, buffer, numbers, first=first)
        return
    for part, gradient_part, buffer_part in _chunks(parameter, gradient, buffer):
        value = part.float()
        slope = (gradient_part.float() * numbers.sign).add_(value, alpha=numbers.decay)
        if numbers.momentum:
            mean = slope if first else buffer_part.float().mul_(numbers.momentum).add_(slope, alpha=numbers.gain)
            _store(buffer_part, mean)
            slope = slope.add(mean, alpha=numbers.momentum) if numbers.nesterov else mean
        _store(part, value.sub_(slope, alpha=numbers.rate))


# Where the work is done -----------------------------------------------------------------------------------------------


def _store(target: Tensor, exact: Tensor) -> None:
    """Store into a state, which may be wider than the parameter if another step narrows it."""
    target.copy_(round_stochastically(exact) if target.dtype == torch.bfloat16 else exact)


def _fused(*tensors: Tensor) -> bool:
    """Return whether one kernel can do it: CUDA with Triton, parameter and states contiguous and BF16."""
    parameter, _, *states = tensors
    narrow = all(tensor.dtype == torch.bfloat16 for tensor in (parameter, *states))
    on_gpu = all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
    return narrow and on_gpu and has_triton()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat chunks of tensors of one shape, or the tensors themselves if not all are contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    yield from zip(*(tensor.view(-1).split(_CHUNK_ELEMENTS) for tensor in tensors), strict=True)

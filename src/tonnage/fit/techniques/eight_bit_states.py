"""Optimizer states in 8 bits per element instead of 32 or 16, with one FP32 scale per block. Steps compute in FP32.

A code is a position on a power curve between zero and the largest magnitude of its block. The first moment is signed
and squared, q → (q/127)²: levels are dense where values are small. The second moment spans the square of that range,
so it uses the fourth power, q → ((q+1)/256)⁴; its root, which the step divides by, is then off by less than 3 % down
to a fiftieth of the block's maximum. Its lowest level is not zero: tiny second moments must not become huge steps.

Rounding is stochastic and unbiased. A second moment moves by a thousandth per step, less than any 8-bit spacing:
rounded to nearest it would never change.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import SGD, Adam

from tonnage.fit.stepping.parameter_step import (
    MASTER,
    Group,
    OneByOneStepper,
    PlainStep,
    State,
    Step,
    parameter_steps,
    why_not_in_pieces,
)
from tonnage.fit.stepping.pieces import flat, flat_like
from tonnage.fit.stepping.stochastic import AdamStep, SgdStep, StochasticStep, has_triton
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu

SMALL_ELEMENTS = 4096  # smaller states stay as they are: little to save, and norms and biases are sensitive
_CHUNK_ELEMENTS = 2**22  # 16 MiB per FP32 temporary, about a dozen at a time
_SCALES = ".scales"


@dataclass(frozen=True)
class Code:
    """The levels ((q + bias) / top) ** power, with or without a sign, for q up to `largest`."""

    signed: bool
    top: int
    bias: int
    power: int
    largest: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def level(self, place: Tensor) -> Tensor:
        return ((place + self.bias) / self.top) ** self.power

    def quantise(self, values: Tensor, block: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return codes and scales of flat values. `noise` in [0, 1) rounds stochastically; None rounds to nearest."""
        rows = _in_blocks(values.float(), block)
        scales = rows.abs().amax(1)
        size = (rows.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).clamp_(max=1.0)
        lower = (size ** (1 / self.power) * self.top - self.bias).floor_().clamp_(0, self.largest)
        # The root above is inexact: step back where it fell into the next interval.
        lower -= (self.level(lower) > size).logical_and_(lower > 0).float()
        below = self.level(lower)
        share = (size - below) / (self.level(lower + 1) - below)
        up = share > (0.5 if noise is None else _in_blocks(noise, block))
        place = (lower + up).clamp_(max=self.largest)
        codes = (place * rows.sign() if self.signed else place).to(self.dtype)
        return codes.view(-1)[: values.numel()], scales

    def dequantise(self, codes: Tensor, scales: Tensor, block: int) -> Tensor:
        rows = _in_blocks(codes, block).float()
        levels = self.level(rows.abs()) * scales[:, None]
        return (levels * rows.sign() if self.signed else levels).view(-1)[: codes.numel()]


def _in_blocks(values: Tensor, block: int) -> Tensor:
    return pad(values, (0, -values.numel() % block)).view(-1, block)


SIGNED = Code(signed=True, top=127, bias=0, power=2, largest=127)
UNSIGNED = Code(signed=False, top=256, bias=1, power=4, largest=255)
CODES = {"exp_avg": SIGNED, "momentum_buffer": SIGNED, "exp_avg_sq": UNSIGNED, "max_exp_avg_sq": UNSIGNED}


class EightBitStep(Step):
    """Dequantizes a chunk's states, steps it with the inner step and quantizes them again.

    On a GPU with Triton, Adam and SGD run as one kernel, if the inner step is plain or rounds stochastically.
    """

    converts = True

    def __init__(self, inner: Step, block: int) -> None:
        self.inner = inner
        self.block = block
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        if parameter.numel() < SMALL_ELEMENTS:
            self.inner(parameter, gradient, state, group)
            return
        parameter, gradient = flat(parameter), flat_like(gradient, parameter)
        has_kernel = parameter.is_cuda and (on_virtual_gpu(parameter.device) or has_triton())
        known = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and not group.get("amsgrad")
        if has_kernel and known and isinstance(self.inner, PlainStep | StochasticStep):
            self._step_by_kernel(parameter, gradient, state, group)
            return
        before = dict(state)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for piece in _chunks(parameter.numel()):
            # Coded states dequantized, others of the parameter's size as views, counters copied.
            opened: State = {}
            for name, value in before.items():
                if name + _SCALES in before:
                    opened[name] = self._read(name, before, piece, wide)
                elif isinstance(value, Tensor) and value.numel() == parameter.numel():
                    opened[name] = flat(value)[piece]
                elif not name.endswith(_SCALES):
                    opened[name] = deepcopy(value)
            part, slope = parameter[piece], gradient[piece]
            if part.dtype == wide or not isinstance(self.inner, PlainStep):
                self.inner(part, slope, opened, group)
            else:  # the optimizer's own step needs one dtype throughout
                value = part.to(wide)
                self.inner(value, slope.to(wide), opened, group)
                part.copy_(value)
            for name, value in opened.items():
                if name in CODES and isinstance(value, Tensor):
                    self._make_codes(name, state, parameter)
                    self._write(name, value, state, piece, stochastic=True)
                elif not isinstance(value, Tensor) or value.dim() == 0:
                    state[name] = value

    def plain_state(self, parameter: Tensor, state: State) -> State:
        dtype = torch.float32 if MASTER in state else parameter.dtype
        widened = {name: value for name, value in state.items() if not name.endswith(_SCALES)}
        for name in [name for name in widened if name + _SCALES in state]:
            widened[name] = torch.empty_like(parameter, dtype=dtype, device=state[name].device)
            for piece in _chunks(parameter.numel()):
                flat(widened[name])[piece] = self._read(name, state, piece, dtype)
        return self.inner.plain_state(parameter, widened)

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        state = self.inner.own_state(parameter, plain, group)
        if parameter.numel() < SMALL_ELEMENTS:
            return state
        for name in [name for name in state if name in CODES and isinstance(state[name], Tensor)]:
            values = flat_like(state[name], parameter)
            self._make_codes(name, state, parameter)
            for piece in _chunks(parameter.numel()):
                self._write(name, values[piece], state, piece, stochastic=False)
        return state

    def _make_codes(self, name: str, state: State, parameter: Tensor) -> None:
        if name + _SCALES not in state:
            count, device = parameter.numel(), parameter.device
            state[name] = torch.empty(count, dtype=CODES[name].dtype, device=device)
            state[name + _SCALES] = torch.empty(-(-count // self.block), dtype=torch.float32, device=device)

    def _write(self, name: str, values: Tensor, state: State, piece: slice, *, stochastic: bool) -> None:
        generator = self._generator(values.device) if stochastic else None
        noise = torch.rand(values.shape, device=values.device, generator=generator) if stochastic else None
        codes, scales = CODES[name].quantise(values, self.block, noise)
        state[name][piece] = codes
        state[name + _SCALES][self._blocks(piece)] = scales

    def _read(self, name: str, state: State, piece: slice, dtype: torch.dtype) -> Tensor:
        scales = state[name + _SCALES][self._blocks(piece)]
        return CODES[name].dequantise(state[name][piece], scales, self.block).to(dtype)

    def _blocks(self, piece: slice) -> slice:
        return slice(piece.start // self.block, -(-piece.stop // self.block))

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return a separate generator, so that the model's random numbers are unaffected."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(torch.initial_seed())
        return self._generators[device]

    def _step_by_kernel(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        first = not any(name in CODES for name in state)
        adam = "betas" in group
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if group["momentum"] else ()
        for name in names:
            self._make_codes(name, state, parameter)
            if first:
                state[name].zero_()
                state[name + _SCALES].zero_()
        if adam:
            # The step count lives on the host, where reading it needs no synchronization.
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)).cpu() + 1
        if on_virtual_gpu(parameter.device):
            return  # the kernel allocates nothing, and a virtual device has no values
        from tonnage.fit.stepping import step_kernels

        step_kernels.step_coded(
            parameter,
            gradient,
            tuple((state[name], state[name + _SCALES]) for name in names),
            AdamStep.of(group, int(state["step"].item())) if adam else SgdStep.of(group),
            block=self.block,
            seed=int(torch.randint(2**31 - 1, (), generator=self._generator(torch.device("cpu"))).item()),
            stochastic=isinstance(self.inner, StochasticStep) and parameter.dtype == torch.bfloat16,
            first=first,
        )


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK_ELEMENTS, count)) for start in range(0, count, _CHUNK_ELEMENTS))


class EightBitStates(Technique, name="eight-bit-states"):
    block: int = 256  # elements that share a scale

    def __post_init__(self) -> None:
        if self.block not in (32, 64, 128, 256, 512, 1024, 2048):
            raise NotApplicable(
                f"Blocks of {self.block} elements were asked for.", hint="Choose a power of two from 32 to 2048."
            )

    def why_not(self, training: Training) -> str | None:
        optimizer = training.optimizer
        if not isinstance(optimizer, Adam | SGD):
            return f"its codes are made for Adam, AdamW and SGD, and this is {type(optimizer).__name__}"
        if isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups):
            return "SGD without momentum keeps no states"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} was made with differentiable=True, and rounding has no derivative"
        return why_not_in_pieces(optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        steps = parameter_steps(training.optimizer)
        stack.callback(steps.replace(EightBitStep(steps.function, self.block)))
        stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))

"""Triton kernels of the stochastic step: one pass that reads 8 and writes 6 bytes per element for Adam.

Imported only with Triton. Random bits are counter-based (Philox): one seed per call and the element's index. A
Philox call yields 128 bits and an element needs 48, so each program handles two halves with one call.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tonnage.fit.stepping.stochastic import AdamStep, SgdStep

_HALF = 1024
_ROUNDS: tl.constexpr = tl.constexpr(7)  # the fewest Philox rounds that pass the usual randomness tests


def adam(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, numbers: AdamStep) -> None:
    grid = (triton.cdiv(parameter.numel(), 2 * _HALF),)
    with torch.cuda.device_of(parameter):
        _adam_kernel[grid](
            parameter,
            gradient,
            average,
            square,
            parameter.numel(),
            _seed(),
            numbers.average_gain,
            numbers.square_gain,
            numbers.size,
            numbers.root_scale,
            numbers.eps,
            numbers.shrink,
            numbers.decay,
            numbers.sign,
            HALF=_HALF,
        )


def sgd(parameter: Tensor, gradient: Tensor, buffer: Tensor, numbers: SgdStep, *, first: bool) -> None:
    grid = (triton.cdiv(parameter.numel(), 2 * _HALF),)
    with torch.cuda.device_of(parameter):
        _sgd_kernel[grid](
            parameter,
            gradient,
            buffer,
            parameter.numel(),
            _seed(),
            numbers.rate,
            numbers.momentum,
            numbers.gain,
            numbers.decay,
            numbers.sign,
            MOMENTUM=numbers.momentum != 0,
            FIRST=first,
            NESTEROV=numbers.nesterov,
            HALF=_HALF,
        )


def _seed() -> int:
    """Sample a seed from the host's generator, which `torch.manual_seed` sets."""
    return int(torch.randint(2**31 - 1, ()).item())


@triton.jit
def round_stochastically(value, noise):
    """Round FP32 to BF16 with 16 random bits."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (((bits + noise) >> 16) << 16).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, value).to(tl.bfloat16)


@triton.jit
def _adam_half(
    parameter, gradient, average, square, at, inside, noise, more_noise,
    average_gain, square_gain, size, root_scale, eps, shrink, decay, sign,
):  # fmt: skip
    value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign + decay * value
    first = tl.load(average + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    first = first + average_gain * (slope - first)
    second = second * (1.0 - square_gain) + square_gain * slope * slope
    value = value * shrink - size * first / (tl.sqrt(second) * root_scale + eps)
    tl.store(parameter + at, round_stochastically(value, noise & 0xFFFF), mask=inside)
    tl.store(average + at, round_stochastically(first, noise >> 16), mask=inside)
    tl.store(square + at, round_stochastically(second, more_noise & 0xFFFF), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adam_kernel(
    parameter, gradient, average, square, count, seed,
    average_gain, square_gain, size, root_scale, eps, shrink, decay, sign,
    HALF: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, HALF)
    program = tl.program_id(0)
    noise_0, noise_1, noise_2, noise_3 = tl.randint4x(seed, program * HALF + lane, n_rounds=_ROUNDS)
    at = program.to(tl.int64) * (2 * HALF) + lane
    _adam_half(
        parameter, gradient, average, square, at, at < count,
        noise_0.to(tl.uint32, bitcast=True), noise_1.to(tl.uint32, bitcast=True),
        average_gain, square_gain, size, root_scale, eps, shrink, decay, sign,
    )  # fmt: skip
    at += HALF
    _adam_half(
        parameter, gradient, average, square, at, at < count,
        noise_2.to(tl.uint32, bitcast=True), noise_3.to(tl.uint32, bitcast=True),
        average_gain, square_gain, size, root_scale, eps, shrink, decay, sign,
    )  # fmt: skip


@triton.jit
def _sgd_half(
    parameter, gradient, buffer, at, inside, noise, rate, momentum, gain, decay, sign,
    MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign + decay * value
    if MOMENTUM:
        mean = slope
        if not FIRST:
            mean = tl.load(buffer + at, mask=inside, other=0.0).to(tl.float32) * momentum + gain * slope
        tl.store(buffer + at, round_stochastically(mean, noise >> 16), mask=inside)
        slope = slope + momentum * mean if NESTEROV else mean
    tl.store(parameter + at, round_stochastically(value - rate * slope, noise & 0xFFFF), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _sgd_kernel(
    parameter, gradient, buffer, count, seed, rate, momentum, gain, decay, sign,
    MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, HALF)
    program = tl.program_id(0)
    noise_0, noise_1, _, _ = tl.randint4x(seed, program * HALF + lane, n_rounds=_ROUNDS)
    at = program.to(tl.int64) * (2 * HALF) + lane
    _sgd_half(
        parameter, gradient, buffer, at, at < count, noise_0.to(tl.uint32, bitcast=True),
        rate, momentum, gain, decay, sign, MOMENTUM, FIRST, NESTEROV,
    )  # fmt: skip
    at += HALF
    _sgd_half(
        parameter, gradient, buffer, at, at < count, noise_1.to(tl.uint32, bitcast=True),
        rate, momentum, gain, decay, sign, MOMENTUM, FIRST, NESTEROV,
    )  # fmt: skip

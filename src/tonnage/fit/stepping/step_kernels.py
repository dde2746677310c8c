"""Triton kernels that step BF16 and 8-bit states in one pass over memory. Imported only with Triton.

Random bits are counter-based (Philox): one seed per call and the element's index. The stochastic step of Adam reads 8
and writes 6 bytes per element. A Philox call yields 128 bits and an element needs 48, so each program handles two
halves with one call. With 8-bit states a program handles a few whole blocks, so that their new scales are known before
their codes are written; the arithmetic is that of `eight_bit_states.Code`, which documents it.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tonnage.fit.stepping.stochastic import AdamStep, SgdStep

Coded = tuple[Tensor, Tensor]  # codes and scales
_HALF = 1024
_TILE_ELEMENTS = 2048
_ROUNDS: tl.constexpr = tl.constexpr(7)  # the fewest Philox rounds that pass the usual randomness tests


def step(
    parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: AdamStep | SgdStep, *, first: bool
) -> None:
    """Step BF16 states with stochastic rounding. The seed is the host generator's, which `torch.manual_seed` sets."""
    seed = int(torch.randint(2**31 - 1, ()).item())
    grid = (triton.cdiv(parameter.numel(), 2 * _HALF),)
    with torch.cuda.device_of(parameter):
        if isinstance(numbers, AdamStep):
            _adam_kernel[grid](parameter, gradient, *states, parameter.numel(), seed, *numbers, HALF=_HALF)
        else:
            *scalars, nesterov = numbers
            _sgd_kernel[grid](
                parameter, gradient, *states, parameter.numel(), seed, *scalars,
                MOMENTUM=numbers.momentum != 0, FIRST=first, NESTEROV=nesterov, HALF=_HALF,
            )  # fmt: skip


def step_coded(
    parameter: Tensor,
    gradient: Tensor,
    states: tuple[Coded, ...],
    numbers: AdamStep | SgdStep,
    *,
    block: int,
    seed: int,
    stochastic: bool,
    first: bool,
) -> None:
    """Step 8-bit states; `stochastic` rounds BF16 parameters, `first` marks the parameter's first step."""
    rows = max(1, _TILE_ELEMENTS // block)
    grid = (triton.cdiv(parameter.numel(), rows * block),)
    # Without momentum there is no state; the parameter stands in for codes that are never read.
    coded = [tensor for state in states or ((parameter, parameter),) for tensor in state]
    with torch.cuda.device_of(parameter):
        if isinstance(numbers, AdamStep):
            _coded_adam_kernel[grid](
                parameter, gradient, *coded, parameter.numel(), seed, *numbers,
                STOCHASTIC=stochastic, ROWS=rows, BLOCK=block,
            )  # fmt: skip
        else:
            *scalars, nesterov = numbers
            _coded_sgd_kernel[grid](
                parameter, gradient, *coded, parameter.numel(), seed, *scalars, MOMENTUM=numbers.momentum != 0,
                FIRST=first, NESTEROV=nesterov, STOCHASTIC=stochastic, ROWS=rows, BLOCK=block,
            )  # fmt: skip


@triton.jit
def round_stochastically(value, noise):
    """Round FP32 to BF16 with 16 random bits."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (((bits + noise) >> 16) << 16).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, value).to(tl.bfloat16)


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
    for half in tl.static_range(2):
        inside = at < count
        noise = (noise_0 if half == 0 else noise_2).to(tl.uint32, bitcast=True)
        more_noise = (noise_1 if half == 0 else noise_3).to(tl.uint32, bitcast=True)
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
        at += HALF


@triton.jit(do_not_specialize=["seed"])
def _sgd_kernel(
    parameter, gradient, buffer, count, seed, rate, momentum, gain, decay, sign,
    MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, HALF)
    program = tl.program_id(0)
    noise_0, noise_1, _, _ = tl.randint4x(seed, program * HALF + lane, n_rounds=_ROUNDS)
    at = program.to(tl.int64) * (2 * HALF) + lane
    for half in tl.static_range(2):
        inside = at < count
        noise = (noise_0 if half == 0 else noise_1).to(tl.uint32, bitcast=True)
        value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign + decay * value
        if MOMENTUM:
            mean = slope
            if not FIRST:
                mean = tl.load(buffer + at, mask=inside, other=0.0).to(tl.float32) * momentum + gain * slope
            tl.store(buffer + at, round_stochastically(mean, noise >> 16), mask=inside)
            slope = slope + momentum * mean if NESTEROV else mean
        tl.store(parameter + at, round_stochastically(value - rate * slope, noise & 0xFFFF), mask=inside)
        at += HALF


# 8-bit states --------------------------------------------------------------------------------------------------------


@triton.jit
def _level(place, SIGNED: tl.constexpr):
    root = place * (1.0 / 127.0) if SIGNED else (place + 1.0) * (1.0 / 256.0)
    return root * root if SIGNED else root * root * (root * root)


@triton.jit
def _codes(values, scales, bits, SIGNED: tl.constexpr):
    size = tl.minimum(tl.abs(values) / tl.maximum(scales, 1.17549435e-38)[:, None], 1.0)
    root = tl.sqrt(size) * 127.0 if SIGNED else tl.sqrt(tl.sqrt(size)) * 256.0 - 1.0
    lower = tl.floor(root) if SIGNED else tl.maximum(tl.floor(root), 0.0)
    lower = tl.where((_level(lower, SIGNED) > size) & (lower > 0.0), lower - 1.0, lower)
    below = _level(lower, SIGNED)
    share = (size - below) / (_level(lower + 1.0, SIGNED) - below)
    noise = (bits & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216.0)  # 24 random bits as a number in [0, 1)
    place = tl.minimum(tl.where(share > noise, lower + 1.0, lower), 127.0 if SIGNED else 255.0)
    return tl.where(values < 0.0, -place, place).to(tl.int8) if SIGNED else place.to(tl.uint8)


@triton.jit
def _values(codes, scales, SIGNED: tl.constexpr):
    place = codes.to(tl.float32)
    levels = _level(tl.abs(place) if SIGNED else place, SIGNED) * scales[:, None]
    return tl.where(place < 0.0, -levels, levels) if SIGNED else levels


@triton.jit
def _store_parameter(parameter, at, inside, value, bits, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        tl.store(parameter + at, round_stochastically(value, bits.to(tl.uint32, bitcast=True) & 0xFFFF), mask=inside)
    else:
        tl.store(parameter + at, value.to(parameter.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _coded_adam_kernel(
    parameter, gradient, average, average_scales, square, square_scales, count, seed,
    average_gain, square_gain, size, root_scale, eps, shrink, decay, sign,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    row_inside = row * BLOCK < count
    noise_0, noise_1, noise_2, _ = tl.randint4x(seed, at.to(tl.int32), n_rounds=_ROUNDS)

    value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign + decay * value
    scale = tl.load(average_scales + row, mask=row_inside, other=0.0)
    first = _values(tl.load(average + at, mask=inside, other=0), scale, True)
    scale = tl.load(square_scales + row, mask=row_inside, other=0.0)
    second = _values(tl.load(square + at, mask=inside, other=0), scale, False)

    first = first + average_gain * (slope - first)
    second = second * (1.0 - square_gain) + square_gain * slope * slope
    value = value * shrink - size * first / (tl.sqrt(second) * root_scale + eps)
    _store_parameter(parameter, at, inside, value, noise_0, STOCHASTIC)

    scale = tl.max(tl.where(inside, tl.abs(first), 0.0), axis=1)
    tl.store(average_scales + row, scale, mask=row_inside)
    tl.store(average + at, _codes(first, scale, noise_1, True), mask=inside)
    scale = tl.max(tl.where(inside, second, 0.0), axis=1)
    tl.store(square_scales + row, scale, mask=row_inside)
    tl.store(square + at, _codes(second, scale, noise_2, False), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _coded_sgd_kernel(
    parameter, gradient, buffer, buffer_scales, count, seed, rate, momentum, gain, decay, sign,
    MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    row_inside = row * BLOCK < count
    noise_0, noise_1, _, _ = tl.randint4x(seed, at.to(tl.int32), n_rounds=_ROUNDS)

    value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign + decay * value
    if MOMENTUM:
        mean = slope
        if not FIRST:
            scale = tl.load(buffer_scales + row, mask=row_inside, other=0.0)
            mean = _values(tl.load(buffer + at, mask=inside, other=0), scale, True) * momentum + gain * slope
        scale = tl.max(tl.where(inside, tl.abs(mean), 0.0), axis=1)
        tl.store(buffer_scales + row, scale, mask=row_inside)
        tl.store(buffer + at, _codes(mean, scale, noise_1, True), mask=inside)
        slope = slope + momentum * mean if NESTEROV else mean
    _store_parameter(parameter, at, inside, value - rate * slope, noise_0, STOCHASTIC)

"""The launch configuration of PyTorch's CUDA reductions, and the global memory that blocks need to combine results.

A reduction split over several thread blocks stages partial results in a buffer, with a semaphore for each output. The
configuration depends on sizes and strides after dimensions have been sorted and merged, on the element types, and on
the number of SMs. This module does not use tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

INT32_MAX = 2**31 - 1
MAX_THREADS = 512
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
# Smaller reductions are never split: 128 threads (vectors of 4 outputs) of 256 values, 64 for complex doubles.
FEWEST_SPLIT = 64 * MAX_VALUES_PER_THREAD


@dataclass(frozen=True, slots=True)
class Element:
    """The element sizes of a reduction, in bytes: as read and as accumulated; and how many values a load takes."""

    scalar_bytes: int
    carried_bytes: int
    vector: int = 4
    max_threads: int = MAX_THREADS


@dataclass(frozen=True, slots=True)
class WarpLimits:
    """The properties of the card that matter."""

    multiprocessors: int
    threads_per_multiprocessor: int
    warp: int = 32


@dataclass(frozen=True, slots=True)
class Loop:
    """Sizes and byte strides, fastest dimension first; reduced dimensions have output stride 0 and come first."""

    shape: tuple[int, ...]
    output: tuple[int, ...]
    input: tuple[int, ...]
    address: int

    def reduced(self) -> int:
        return self.output.count(0)

    def outputs(self) -> int:
        return prod(size for size, stride in zip(self.shape, self.output, strict=True) if stride)

    def numel(self) -> int:
        return prod(self.shape)


@lru_cache(maxsize=4096)
def make_loop(shape: tuple[int, ...], output: tuple[int, ...], input: tuple[int, ...], address: int) -> Loop:
    """Build a loop with dimensions sorted by stride (in bytes) and merged where they are contiguous."""
    order = _sorted_dimensions(shape, output, input)
    merged: list[tuple[int, int, int]] = []
    for size, out, stride in ((shape[d], output[d], input[d]) for d in order):
        last_size, last_out, last_stride = merged[-1] if merged else (0, 0, 0)
        is_one_run = last_size * last_out == out and last_size * last_stride == stride
        if merged and (1 in (last_size, size) or is_one_run):
            merged[-1] = (last_size * size, *((out, stride) if last_size == 1 else (last_out, last_stride)))
        else:
            merged.append((size, out, stride))
    sizes, outs, strides = zip(*merged, strict=True) if merged else ((), (), ())
    return Loop(tuple(sizes), tuple(outs), tuple(strides), address)


def _sorted_dimensions(shape: tuple[int, ...], output: tuple[int, ...], input: tuple[int, ...]) -> list[int]:
    """Sort by insertion, because the comparison can be ambiguous and the order then matters."""

    def compare(a: int, b: int) -> int:
        if (output[a] == 0) != (output[b] == 0):
            return 1 if output[b] == 0 else -1
        for strides in (output, input):
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return -1 if strides[a] < strides[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        place = i
        for j in range(i - 1, -1, -1):
            swap = compare(order[j], order[place])
            if swap < 0:
                break
            if swap > 0:
                order[j], order[place] = order[place], order[j]
                place = j
    return order


@lru_cache(maxsize=4096)
def staging_bytes(loop: Loop, element: Element, card: WarpLimits) -> tuple[tuple[int, int], ...]:
    """Return (buffer, semaphores) of each launch, (0, 0) if it needs none; loops beyond 32-bit offsets take several."""
    return tuple(_staging(part, element, card) for part in _within_32_bits(loop))


@lru_cache(maxsize=4096)
def fits_32_bits(loop: Loop) -> bool:
    """Whether all offsets fit 32 bits, so that one launch is enough."""
    if loop.numel() > INT32_MAX:
        return False
    return all(
        1 + sum((size - 1) * stride for size, stride in zip(loop.shape, strides, strict=True)) <= INT32_MAX
        for strides in (loop.output, loop.input)
    )


def _within_32_bits(loop: Loop) -> Iterator[Loop]:
    if fits_32_bits(loop):
        yield loop
        return
    extents = [
        (size - 1) * max(out, stride) for size, out, stride in zip(loop.shape, loop.output, loop.input, strict=True)
    ]
    longest = max(range(len(extents)), key=lambda d: (extents[d], d))
    size = loop.shape[longest]
    for start, part in ((0, size // 2), (size // 2, size - size // 2)):
        shape = (*loop.shape[:longest], part, *loop.shape[longest + 1 :])
        yield from _within_32_bits(replace(loop, shape=shape, address=loop.address + start * loop.input[longest]))


def _staging(loop: Loop, element: Element, card: WarpLimits) -> tuple[int, int]:
    outputs = loop.outputs()
    inputs = loop.numel() // outputs
    reduced = loop.reduced()
    along_input = reduced == len(loop.shape) or loop.input[0] < loop.input[reduced]
    width_limit, height_limit = (inputs, outputs) if along_input else (outputs, inputs)
    output_vector = 1
    if loop.input[0 if along_input else reduced] == element.scalar_bytes:
        if not along_input:
            output_vector = _output_vector(loop, element.scalar_bytes)
            width_limit //= output_vector
        elif width_limit >= 128 and reduced == 1:
            width_limit //= element.vector
    width, height = _block(width_limit, height_limit, element.max_threads // output_vector, card.warp)
    values = -(-inputs // (width if along_input else 1))
    if values < min(height * 16, MAX_VALUES_PER_THREAD):
        return 0, 0
    values = -(-inputs // ((width if along_input else 1) * height))
    step_output = 1 if along_input else width
    grid = -(-(outputs // output_vector) // step_output)
    target = card.multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if values < MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return 0, 0
    staged = outputs * blocks * (1 if along_input else width * output_vector)
    return staged * element.carried_bytes, 4 * grid


def _output_vector(loop: Loop, scalar_bytes: int) -> int:
    vector = 4
    reduced = loop.reduced()
    strides = [s // scalar_bytes for d, s in enumerate(loop.input) if d != reduced]
    for number in (loop.address // scalar_bytes, loop.shape[reduced], *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int, warp: int) -> tuple[int, int]:
    width_power = last_power(width) if width < threads else threads
    height_power = last_power(height) if height < threads else threads
    block_height = min(height_power, threads // min(width_power, warp))
    return min(width_power, threads // block_height), block_height


def last_power(number: int) -> int:
    """Return the largest power of two up to a number; 1 if it is not positive."""
    return 1 << (max(number, 1).bit_length() - 1)

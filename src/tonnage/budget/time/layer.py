"""Seconds of one micro-batch through one layer, and through embedding, head and loss: forward, backward, recomputed.

Kernel times and the host's launch times come from `tonnage.clock`. The power limit is not applied here: it depends on
the whole step.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from tonnage.budget.time.launches import LaunchCost, PartLaunches
from tonnage.budget.training.configuration import Configuration, Quantity
from tonnage.clock import kernels
from tonnage.clock.host import PhaseCosts, host_costs
from tonnage.clock.kernels.figures import peak
from tonnage.clock.launch import Launch
from tonnage.clock.timeline import KERNEL_GAP_S
from tonnage.hardware import Gpu

_ARITHMETIC = ("matmul", "attention")
_WITHOUT_TENSOR_CORES = ("fp32", "fp64")  # these do not reach a GPU's power limit
_SAVED_BY_ATTENTION = 6  # queries, keys, values, output, log-sum-exp and RNG state
_SAVED_BY_OTHERS = 2 / 3  # per operator, from autograd's formulas: 19 of the 30 in a Llama layer
Phase = Literal["forward", "backward", "optimizer"]
_TIMED: dict[tuple[object, ...], Any] = {}
_MOST_TIMED = 4096
FIGURES = 8 * 4  # of a layer's work: each part's seconds


class FieldByField:
    """Adds and scales every field, be it seconds or a record of this kind again."""

    __slots__: tuple[str, ...] = ()

    def values(self) -> tuple[Any, ...]:
        """Return all fields in order."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, self.values(), other.values()))

    def __mul__(self, times: Quantity) -> Self:
        return type(self)(*[value * times for value in self.values()])

    __rmul__ = __mul__
    __array_ufunc__ = None  # makes `array * record` call `__rmul__` once

    def each(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with every figure changed."""
        return type(self)(*(value.each(change) if hasattr(value, "each") else change(value) for value in self.values()))


@dataclass(frozen=True, slots=True)
class Busy(FieldByField):
    """Seconds of a GPU and of its host for some kernels, before the power limit.

    `arithmetic_s` is the time of products and attention on tensor cores, `at_peak_s` their time at the peak rate,
    `other_s` the rest; the host launches all of it in `host_s`.
    """

    arithmetic_s: Quantity = 0.0
    other_s: Quantity = 0.0
    at_peak_s: Quantity = 0.0
    host_s: Quantity = 0.0

    # Written out: a search does little else.
    def __add__(self, other: "Busy") -> "Busy":
        arithmetic_s, other_s = self.arithmetic_s + other.arithmetic_s, self.other_s + other.other_s
        return Busy(arithmetic_s, other_s, self.at_peak_s + other.at_peak_s, self.host_s + other.host_s)

    def __mul__(self, times: Quantity) -> "Busy":
        return Busy(times * self.arithmetic_s, times * self.other_s, times * self.at_peak_s, times * self.host_s)

    __rmul__ = __mul__

    def slowed(self, times: Quantity) -> "Busy":
        """Return the same work on a GPU that is `times` times slower."""
        return Busy(self.arithmetic_s * times, self.other_s * times, self.at_peak_s * times, self.host_s)

    @property
    def card_s(self) -> Quantity:
        """Seconds of the GPU at its full clock."""
        return self.arithmetic_s + self.other_s

    def at(self, slower: Quantity) -> Quantity:
        """Return the GPU's seconds with arithmetic slowed by this factor."""
        return self.arithmetic_s * slower + self.other_s


@dataclass(frozen=True, slots=True)
class PassTime(FieldByField):
    """A micro-batch. `recompute` is what full activation checkpointing adds to the backward pass."""

    forward: Busy = Busy()
    backward: Busy = Busy()
    recompute: Busy = Busy()

    @property
    def whole(self) -> Busy:
        """Forward, backward and recompute together."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True, slots=True)
class LayerWork(FieldByField):
    """The work of a layer, before choosing what is recomputed."""

    products: Busy
    closing: Busy  # the last product
    second: Busy  # every other product
    attention: Busy
    others: Busy
    backward: Busy
    attention_backward: Busy  # not in `backward`
    packing: Busy  # overhead of checkpoint hooks for the saved tensors of a recomputed layer

    @property
    def forward(self) -> Busy:
        """The whole forward pass."""
        return self.products + self.attention + self.others

    def figures(self) -> list[Quantity]:
        """Return all seconds in order."""
        return [figure for part in self.values() for figure in part.values()]

    @classmethod
    def of(cls, figures: Sequence[Quantity]) -> "LayerWork":
        """Build a work from its figures."""
        return cls(*(Busy(*figures[start : start + 4]) for start in range(0, len(figures), 4)))


def work_of(calls: PartLaunches, config: Configuration, gpu: Gpu) -> LayerWork:
    """Return the seconds of all calls of a layer."""
    forward = (calls.products, calls.closing, calls.second, calls.attention, calls.others)
    ways = (*forward, calls.backward, calls.attention_backward)
    launches = [call.launch for way in ways for call in way if call.launch is not None]
    known = dict(zip(map(id, launches), _seconds_of(launches, gpu), strict=True))
    parts = [_sum(way, known, config, gpu, "forward") for way in forward]
    parts += [_sum(way, known, config, gpu, "backward") for way in ways[len(forward) :]]
    # PyTorch's checkpoint hooks pack and unpack every saved tensor in Python.
    saved: Quantity = 0
    if not config.compile and config.traits.written == "transformers":
        counts = (calls.products, 2), (calls.attention, _SAVED_BY_ATTENTION), (calls.others, _SAVED_BY_OTHERS)
        for way, each in counts:
            saved = saved + sum((each * call.times for call in way if call.launch is not None), start=0)
    return LayerWork(*(*parts, Busy(host_s=saved * host_costs().recomputed_tensor)))


def busy(calls: Sequence[LaunchCost], config: Configuration, gpu: Gpu, phase: Phase = "forward") -> Busy:
    """Return the seconds of some calls."""
    known = {id(call.launch): kernels.seconds(call.launch, gpu) for call in calls if call.launch is not None}
    return _sum(calls, known, config, gpu, phase)


def _seconds_of(launches: Sequence[Launch], gpu: Gpu) -> list[Any]:
    """Return the seconds of each launch. Launches that differ only in size are timed together."""
    found: list[Any] = [None] * len(launches)
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, one in enumerate(launches):
        alike[one.kind, one.name, one.variant, one.precision, one.kernels, len(one.shape)].append(place)
    for places in alike.values():
        first = launches[places[0]]
        if len(places) == 1:
            found[places[0]] = _timed(first, gpu)
            continue
        numbers = [(*one.shape, one.moved_bytes, one.operations) for one in (launches[place] for place in places)]
        size = max(np.size(number) for row in numbers for number in row)
        *shape, moved, operations = (
            np.concatenate([np.broadcast_to(number, size) for number in column])
            for column in zip(*numbers, strict=True)
        )
        together = replace(first, shape=tuple(shape), moved_bytes=moved, operations=operations)
        each = np.broadcast_to(_timed(together, gpu), len(places) * size).reshape(len(places), size)
        for place, seconds in zip(places, each, strict=True):
            found[place] = seconds if size > 1 else seconds[0]
    return found


def _timed(launch: Launch, gpu: Gpu) -> Any:
    """Return the clock's seconds, cached: the frameworks that a search compares mostly launch the same kernels."""
    numbers = (*launch.shape, launch.moved_bytes, launch.operations)
    sizes = tuple(number.tobytes() if isinstance(number, np.ndarray) else number for number in numbers)
    key = gpu, launch.kind, launch.name, launch.variant, launch.precision, launch.kernels, sizes
    if key not in _TIMED:
        if len(_TIMED) >= _MOST_TIMED:
            _TIMED.clear()
        _TIMED[key] = kernels.seconds(launch, gpu)
    return _TIMED[key]


def _sum(calls: Iterable[LaunchCost], known: dict[int, Any], config: Configuration, gpu: Gpu, phase: Phase) -> Busy:
    costs = host_costs()
    its: PhaseCosts = getattr(costs, phase)
    arithmetic_s: Quantity = 0.0
    other_s: Quantity = 0.0
    at_peak_s: Quantity = 0.0
    host_s: Quantity = 0.0
    for call in calls:
        launch = call.launch
        called_s: Quantity = call.operators * its.operator + call.inner * its.inner_operator
        called_s = called_s + call.in_python * costs.forward.operator
        if launch is None:
            called_s = call.regions * costs.compiled_region + (0.0 if config.compile else called_s)
            host_s = host_s + call.times * called_s
            continue
        seconds = call.times * (known[id(launch)] + KERNEL_GAP_S * launch.kernels)
        is_arithmetic = launch.kind in _ARITHMETIC
        if is_arithmetic and launch.precision not in _WITHOUT_TENSOR_CORES:
            arithmetic_s = arithmetic_s + seconds
            at_peak_s = at_peak_s + call.times * launch.operations / peak(gpu, launch.precision)
        else:
            other_s = other_s + seconds
        if config.compile and not is_arithmetic:
            called_s = costs.triton_kernel
        else:
            called_s = (its.inner_operator if config.compile else called_s) + its.launch_s(launch)
        host_s = host_s + call.times * called_s + (seconds if call.waits else 0.0)
    return Busy(arithmetic_s, other_s, at_peak_s, host_s)


def layer_pass(work: LayerWork, config: Configuration) -> PassTime:
    """Return the layer's pass, with what checkpointing recomputes."""
    # PyTorch stops at the last tensor that the backward pass needs, so the closing product is not repeated.
    again = work.forward + work.closing * -1.0 + work.packing
    if config.checkpoint == "selective":
        # Either the scores, or every other product and cheap operators.
        again = work.attention if config.traits.selective == "scores" else work.second + work.others
    return PassTime(work.forward, work.backward + work.attention_backward, again)

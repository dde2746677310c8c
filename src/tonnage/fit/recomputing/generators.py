"""The random generators that a forward pass may use, and their states.

These are torch's generators of host and device, Python's, NumPy's, and those that modules hold or receive.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

States = tuple[Any, ...]
_KINDS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


class Generators:
    """All generators of a forward pass; torch's come first, so that their states can be set alone."""

    def __init__(self, device: torch.device, own: Iterable[Any] = ()) -> None:
        found = list({id(generator): generator for generator in own}.values())
        own_torch = [_access(generator) for generator in found if isinstance(generator, torch.Generator)]
        own_others = [_access(generator) for generator in found if not isinstance(generator, torch.Generator)]
        self._torch = [(torch.get_rng_state, torch.set_rng_state), *own_torch]
        if device.type == "cuda":
            # Its state lives on the host: reading it needs no synchronization.
            read, write = torch.cuda.get_rng_state, torch.cuda.set_rng_state
            self._torch.insert(1, (partial(read, device), partial(write, device=device)))
        others: list[Any] = [
            (random.getstate, random.setstate),
            (numpy.random.get_state, numpy.random.set_state),
            *own_others,
        ]
        self._all = [*self._torch, *others]

    def states(self) -> States:
        return tuple(read() for read, _ in self._all)

    def torch_states(self) -> States:
        return tuple(read() for read, _ in self._torch)

    def set(self, states: States) -> None:
        """Set the states of all generators, or of torch's alone."""
        for (_, write), state in zip(self._all, states, strict=False):
            write(state)


def same_states(some: States, others: States) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        torch.equal(one, other) if isinstance(one, Tensor) else pickle.dumps(one) == pickle.dumps(other)
        for one, other in pairs
    )


def held_generators(module: nn.Module) -> Iterator[Any]:
    """Yield generators among the attributes of a module and its submodules, or in lists and mappings there."""
    for child in module.modules():
        for value in vars(child).values():
            yield from given_generators([value])
            if isinstance(value, list | tuple | dict):
                yield from given_generators(value.values() if isinstance(value, dict) else value)


def given_generators(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if isinstance(value, _KINDS))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        return (lambda: bits.state), partial(setattr, bits, "state")
    return generator.get_state, generator.set_state

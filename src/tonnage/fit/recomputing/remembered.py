"""Save and restore what a forward pass changes: buffers and attributes of modules, state of functions, RNG states.

A block that runs twice must find them as they were before the first run, and leave them as the first run did.
"""

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

States = tuple[Any, ...]  # of random generators
_KINDS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_ABSENT = object()
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, str)
# Hooks are not included: a forward that installs one also records that in an attribute.
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Slot:
    """A buffer or attribute of a module; `in_place` if a forward writes into it instead of replacing it."""

    module: nn.Module
    key: str
    is_buffer: bool
    in_place: bool = False

    def read(self) -> Any:
        return self._holder.get(self.key, _ABSENT)

    def write(self, value: Any) -> None:
        if value is _ABSENT:
            self._holder.pop(self.key, None)
        else:
            self._holder[self.key] = value

    def saved(self) -> Any:
        """Return its value, copied if it is changed in place."""
        return _copied(self.read()) if self.in_place else self.read()

    @property
    def _holder(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module.__dict__


@contextmanager
def put_back(slots: Sequence[Slot], values: Sequence[Any]) -> Iterator[None]:
    """Set the slots to copies of these values inside the context, and restore them afterwards."""
    held = [slot.read() for slot in slots]
    for slot, value in zip(slots, values, strict=True):
        slot.write(_copied(value) if slot.in_place else value)
    try:
        yield
    finally:
        for slot, value in zip(slots, held, strict=True):
            slot.write(value)


class Memory:
    """A copy of all buffers and attributes of a module and its submodules at construction time."""

    def __init__(self, module: nn.Module, *, has_values: bool = True) -> None:
        self._module = module
        self._has_values = has_values  # tensors on a virtual GPU have none to compare
        values = {slot: slot.read() for slot in _slots(module)}
        self._values = {slot: (value, _copied(value), _version(value)) for slot, value in values.items()}

    def changed(self) -> dict[Slot, Any]:
        """Return what a forward has changed since, with the previous values."""
        found: dict[Slot, Any] = {}
        for slot in dict.fromkeys([*self._values, *_slots(self._module)]):
            before, copied, version = self._values.get(slot, (_ABSENT, _ABSENT, 0))
            now = slot.read()
            if now is not before:
                if not (isinstance(now, _PLAIN) and type(now) is type(before) and now == before):
                    found[slot] = before
            elif version != _version(now) or not self._equal(now, copied):
                found[Slot(slot.module, slot.key, slot.is_buffer, in_place=True)] = copied
        return found

    def restore(self) -> None:
        """Restore each object and its previous values."""
        for slot in self.changed():
            before, copied, version = self._values.get(
                Slot(slot.module, slot.key, slot.is_buffer), (_ABSENT, _ABSENT, 0)
            )
            if slot.in_place or version != _version(before):
                _fill(before, copied)
            slot.write(before)

    def _equal(self, now: Any, copied: Any) -> bool:
        if isinstance(now, Tensor):
            return not self._has_values or torch.equal(now, copied)
        if isinstance(now, dict):
            return now.keys() == copied.keys() and all(now[key] is copied[key] for key in copied)
        if isinstance(now, _CONTAINERS):
            return len(now) == len(copied) and all(a is b for a, b in zip(now, copied, strict=True))
        return True


@contextmanager
def as_before(function: Any, known: nn.Module) -> Iterator[None]:
    """Restore on exit what a function keeps in its closure or its object: modules there whole, except `known`."""
    owner = getattr(function, "__self__", function)
    cells = list(getattr(function, "__closure__", None) or ())
    attributes = vars(owner) if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module) else {}
    contents = [(cell.cell_contents, _on_host(cell.cell_contents)) for cell in cells]
    values = {key: (value, _on_host(value)) for key, value in attributes.items()}
    held = [owner, *(value for value, _ in (*contents, *values.values()))]
    modules = [Memory(value) for value in held if isinstance(value, nn.Module) and value is not known]
    try:
        yield
    finally:
        for module in modules:
            module.restore()
        for value, copied in (*contents, *values.values()):
            _fill(value, copied)
        for cell, (value, _) in zip(cells, contents, strict=True):
            cell.cell_contents = value
        if values:
            attributes.clear()
            attributes.update({key: value for key, (value, _) in values.items()})


def _slots(module: nn.Module) -> Iterator[Slot]:
    for child in module.modules():
        for key in child._buffers:
            yield Slot(child, key, is_buffer=True)
        for key in child.__dict__.keys() - _STRUCTURE:
            yield Slot(child, key, is_buffer=False)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _on_host(value: Any) -> Any:
    """Return a copy that does not use the GPU memory being measured."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else _copied(value)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _fill(target: Any, values: Any) -> None:
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(values)
    elif isinstance(target, dict | set):
        target.clear()
        target.update(values)
    elif isinstance(target, list | deque):
        target.clear()
        target.extend(values)


class Generators:
    """All generators of a forward pass; torch's come first, so that their states can be set alone."""

    def __init__(self, device: torch.device, own: Iterable[Any] = ()) -> None:
        found = {id(generator): generator for generator in own}.values()
        self._torch: list[Any] = [(torch.get_rng_state, torch.set_rng_state)]
        if device.type == "cuda":
            # Its state lives on the host: reading it needs no synchronization.
            read, write = torch.cuda.get_rng_state, torch.cuda.set_rng_state
            self._torch.append((partial(read, device), partial(write, device=device)))
        self._torch += [_access(generator) for generator in found if isinstance(generator, torch.Generator)]
        others = [_access(generator) for generator in found if not isinstance(generator, torch.Generator)]
        whole = [(random.getstate, random.setstate), (numpy.random.get_state, numpy.random.set_state)]
        self._all = [*self._torch, *whole, *others]

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
    return all(torch.equal(a, b) if isinstance(a, Tensor) else pickle.dumps(a) == pickle.dumps(b) for a, b in pairs)


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

"""What a forward changes in its modules is found, brought back and left as it was."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tonnage.fit.recomputing.remembered import (
    Generators,
    Memory,
    as_before,
    held_generators,
    put_back,
    same_states,
)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("untouched", torch.zeros(2))
        self.count, self.same = 0, 5
        self.several: list[int] = []
        self.named: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.count += 1
        self.same = int("5")
        self.several.append(self.count)
        self.named["a"] = self.count
        self.new = x
        return self.norm(x)


CHANGED = {"written", "replaced", "count", "several", "named", "new"}
NORM = {"running_mean", "running_var", "num_batches_tracked"}


def _values(module: Remembering) -> dict[str, Any]:
    attributes = {key: vars(module).get(key) for key in ("count", "several", "named", "new")}
    return {name: buffer.tolist() for name, buffer in module.named_buffers()} | {
        key: value.copy() if isinstance(value, list | dict) else value for key, value in attributes.items()
    }


def test_exactly_what_changes_is_found() -> None:
    module = Remembering()
    memory = Memory(module)
    assert memory.changed() == {}
    module(torch.randn(3, 2))
    assert {slot.key for slot in memory.changed()} == CHANGED | NORM


def test_a_second_run_sees_what_the_first_saw_and_leaves_no_trace() -> None:
    module, x = Remembering(), torch.randn(3, 2)
    module(x)
    memory, first = Memory(module), _values(module)
    module(x)
    changed, second, lists = memory.changed(), _values(module), module.several
    for _ in range(2):
        with put_back(list(changed), list(changed.values())):
            assert _values(module) == first
            module(x)
            assert _values(module) == second
        assert _values(module) == second
    assert module.several is lists


def test_all_of_it_can_be_restored_into_the_same_objects() -> None:
    module = Remembering()
    memory, before, objects = Memory(module), _values(module), (module.written, module.replaced, module.several)
    hook = module.norm.register_forward_hook(lambda *_: None)
    module(torch.randn(3, 2))
    memory.restore()
    assert _values(module) == before and "new" not in vars(module)
    assert all(a is b for a, b in zip((module.written, module.replaced, module.several), objects, strict=True))
    assert not module.norm._forward_hooks
    hook.remove()


def test_what_a_function_keeps_between_calls_is_restored() -> None:
    calls, count, module, model = [0], 0, Remembering(), nn.Identity()

    def function() -> None:
        nonlocal count
        count += 1
        calls[0] += 1
        calls.append(count)
        module(model(torch.randn(3, 2)))

    before = _values(module)
    with as_before(function, known=model):
        function()
    assert (calls, count) == ([0], 0) and _values(module) == before


class Counter:
    def __init__(self) -> None:
        self.count, self.seen = 0, [1]

    def __call__(self) -> None:
        self.count += 1
        self.seen.append(self.count)
        self.last = 3

    def method(self) -> None:
        self()


@pytest.mark.parametrize("bound", [False, True])
def test_so_is_what_its_object_keeps(bound: bool) -> None:
    counter = Counter()
    function = counter.method if bound else counter
    with as_before(function, known=nn.Identity()):
        function()
    assert vars(counter) == {"count": 0, "seen": [1]}


CPU = torch.device("cpu")


def _draw(own: list) -> list[float]:
    bits, python, numbers, old = own
    torchs = [torch.rand(1).item(), torch.rand(1, generator=bits).item()]
    return [*torchs, random.random(), numpy.random.rand(), python.random(), numbers.random(), old.rand()]


def _own() -> list:
    return [torch.Generator(), random.Random(1), numpy.random.default_rng(2), numpy.random.RandomState(3)]


def test_all_of_them_draw_the_same_again() -> None:
    own = _own()
    generators = Generators(CPU, own)
    states = generators.states()
    drawn = _draw(own)
    assert not same_states(states, generators.states())
    generators.set(states)
    assert same_states(states, generators.states())
    assert _draw(own) == drawn


def test_those_of_torch_can_be_set_alone() -> None:
    own = _own()
    generators = Generators(CPU, own)
    states = generators.torch_states()
    drawn = _draw(own)
    generators.set(states)
    again = _draw(own)
    assert again[:2] == drawn[:2]
    assert all(one != other for one, other in zip(again[2:], drawn[2:], strict=True))


def test_generators_are_found_in_attributes_lists_and_mappings() -> None:
    bits, python, numbers, old = _own()
    module = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    module.bits, module[0].several, module[1].named = bits, [python, 3], {"a": numbers, "b": old}
    assert {id(found) for found in held_generators(module)} == {id(g) for g in (bits, python, numbers, old)}

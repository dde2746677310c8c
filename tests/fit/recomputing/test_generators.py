"""States of every generator that a block may draw from."""

import random

import numpy
import torch
from torch import nn

from tonnage.fit.recomputing.generators import Generators, held_generators, same_states

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

"""What leaves the GPU, and the host memory that it takes."""

import pytest

from tonnage.budget.configuration import Configuration
from tonnage.budget.offload import host_memory, stays
from tonnage.budget.states import States
from tonnage.budget.terms import Term
from tonnage.ledger import Category

PARAMETERS = Term(Category.PARAMETERS, "parameters", 100.0)
GATHERED = Term(Category.PARAMETERS, "gathered parameters", 10.0)
OPTIMIZER = Term(Category.OPTIMIZER_STATES, "adamw states", 200.0)
KEPT = Term(Category.ACTIVATIONS, "kept by block inputs", 50.0)
INSIDE = Term(Category.ACTIVATIONS, "one block", 5.0)
GRADIENTS = Term(Category.GRADIENTS, "gradients", 100.0)
TERMS = (PARAMETERS, GATHERED, OPTIMIZER, KEPT, INSIDE, GRADIENTS)
STATES = States((PARAMETERS, OPTIMIZER), GRADIENTS)


@pytest.mark.parametrize(
    ("choices", "gone"),
    [
        ({}, []),
        ({"optimizer_place": "host"}, [OPTIMIZER]),
        ({"optimizer_place": "host", "framework": "deepspeed"}, [OPTIMIZER, GRADIENTS]),
        ({"parameter_place": "nvme"}, [PARAMETERS]),
        ({"activation_place": "host"}, [KEPT]),
    ],
)
def test_what_leaves(choices: dict[str, str], gone: list[Term]) -> None:
    assert [term for term in TERMS if not stays(term, Configuration(**choices))] == gone


def test_nothing_offloaded_takes_no_host_memory() -> None:
    found = host_memory(TERMS, STATES, Configuration())
    assert (found.host_bytes, found.pinned_bytes) == (0, 0)


def test_an_optimizer_on_the_host_needs_gradients_and_parameters_there() -> None:
    found = host_memory(TERMS, STATES, Configuration(optimizer_place="host"))
    assert (found.host_bytes, found.pinned_bytes) == (200 + 100 + 100, 100 + 100)


def test_a_master_copy_is_the_parameter_it_writes() -> None:
    found = host_memory(TERMS, STATES, Configuration(optimizer_place="host", framework="deepspeed"))
    assert (found.host_bytes, found.pinned_bytes) == (200 + 100, 100)


def test_activations_cross_pinned() -> None:
    found = host_memory(TERMS, STATES, Configuration(activation_place="host"))
    assert (found.host_bytes, found.pinned_bytes) == (50, 50)


def test_a_disk_takes_no_more_host_memory_than_its_buffers() -> None:
    large = Term(Category.PARAMETERS, "parameters", 1e12)
    found = host_memory((large,), States((large,), GRADIENTS), Configuration(parameter_place="nvme"))
    assert found.host_bytes == found.pinned_bytes == 5 * 4e8

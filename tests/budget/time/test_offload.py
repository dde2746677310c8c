"""What leaves the GPU, and the host memory that it takes."""

import pytest

from budget.decoders import llama
from tonnage.budget.terms import Term
from tonnage.budget.time.offload import crossing
from tonnage.budget.time.roofline import calibration
from tonnage.budget.training.adapters import ALL_LINEAR, lora_parameters
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import host_memory, stays
from tonnage.budget.training.states import stages
from tonnage.hardware import find_cluster
from tonnage.ledger import Category

PARAMETERS = Term(Category.PARAMETERS, "parameters", 100.0)
GATHERED = Term(Category.PARAMETERS, "gathered parameters", 10.0)
OPTIMIZER = Term(Category.OPTIMIZER_STATES, "adamw states", 200.0)
KEPT = Term(Category.ACTIVATIONS, "kept by block inputs", 50.0)
INSIDE = Term(Category.ACTIVATIONS, "one block", 5.0)
GRADIENTS = Term(Category.GRADIENTS, "gradients", 100.0)
TERMS = (PARAMETERS, GATHERED, OPTIMIZER, KEPT, INSIDE, GRADIENTS)
STATES = (PARAMETERS,), GRADIENTS


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
    found = host_memory(TERMS, *STATES, Configuration())
    assert (found.host_bytes, found.pinned_bytes) == (0, 0)


def test_an_optimizer_on_the_host_needs_gradients_and_parameters_there() -> None:
    found = host_memory(TERMS, *STATES, Configuration(optimizer_place="host"))
    assert (found.host_bytes, found.pinned_bytes) == (200 + 100 + 100, 100 + 100)


def test_parameters_on_the_host_are_there_once() -> None:
    found = host_memory(TERMS, *STATES, Configuration(optimizer_place="host", parameter_place="host"))
    assert (found.host_bytes, found.pinned_bytes) == (100 + 200 + 100, 100 + 100)


def test_a_frozen_base_is_neither_copied_nor_updated() -> None:
    frozen, adapters = (
        Term(Category.PARAMETERS, name, size) for name, size in (("frozen parameters", 900.0), ("adapters", 100.0))
    )
    found = host_memory(
        (frozen, adapters, OPTIMIZER, GRADIENTS),
        (frozen, adapters),
        GRADIENTS,
        Configuration(optimizer_place="host", lora_rank=8),
    )
    assert (found.host_bytes, found.pinned_bytes) == (200 + 100 + 100, 100 + 100)

    shape, cluster = llama(), find_cluster("h200")
    seconds = {}
    for rank in (0, 8):
        configuration = Configuration(framework="fsdp2", zero=3, optimizer_place="host", lora_rank=rank)
        stage = next(stages(shape, configuration))
        seconds[rank] = crossing(stage, cluster, calibration())
    trained = sum(lora_parameters(shape, 8, ALL_LINEAR)) / shape.parameters
    assert float(seconds[8].step_s) == pytest.approx(float(seconds[0].step_s) * trained)


def test_fsdp2_moves_its_shards_as_wide_as_they_are_and_deepspeed_in_16_bits() -> None:
    shape, cluster = llama(), find_cluster("h200")
    seconds = {}
    for framework in ("fsdp2", "deepspeed"):
        configuration = Configuration(framework=framework, zero=3, parameter_place="host")  # type: ignore[arg-type]
        found = crossing(next(stages(shape, configuration)), cluster, calibration())
        seconds[framework] = float(found.forward_s)
    assert seconds["fsdp2"] == pytest.approx(2 * seconds["deepspeed"])


def test_a_master_copy_is_the_parameter_it_writes() -> None:
    found = host_memory(TERMS, *STATES, Configuration(optimizer_place="host", framework="deepspeed"))
    assert (found.host_bytes, found.pinned_bytes) == (200 + 100, 100)


def test_activations_cross_pinned() -> None:
    found = host_memory(TERMS, *STATES, Configuration(activation_place="host"))
    assert (found.host_bytes, found.pinned_bytes) == (50, 50)


def test_a_disk_takes_no_more_host_memory_than_its_buffers() -> None:
    large = Term(Category.PARAMETERS, "parameters", 1e12)
    found = host_memory((large,), (large,), GRADIENTS, Configuration(parameter_place="nvme"))
    assert found.host_bytes == found.pinned_bytes == 5 * 4e8

"""The training half of docs/examples.md, number by number."""

import pytest

from budget.decoders import bytes_of
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.budget.training.states import model_states_bytes, optimizer_bytes
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model

GB = 1e9
H200 = find_gpu("h200")
LLAMA_70B = find_model("llama-3.1-70b")
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)


def test_7b_in_fp32_with_adam() -> None:
    each = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": optimizer_bytes("adam")}
    assert model_states_bytes(7_000_000_000, **each) == 112 * GB


@pytest.mark.parametrize(("size", "expected"), [(2, 140), (4, 280)])
def test_the_weights_of_a_70b(size: int, expected: int) -> None:
    only = {"parameter_bytes": size, "gradient_bytes": 0, "optimizer_bytes": 0}
    assert model_states_bytes(70_000_000_000, **only) == expected * GB


@pytest.mark.parametrize(("zero", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_over_64_gpus(zero: int, expected: float) -> None:
    found = float(model_states_bytes(7_500_000_000, zero=zero, ranks=64)) / GB
    assert round(found, 2 if zero == 3 else 1) == expected


def test_zero_3_over_1024_gpus() -> None:
    alone, shared = (model_states_bytes(10**12, zero=3, ranks=ranks) for ranks in (1, 1024))
    assert shared == alone / 1024
    assert float(shared) / GB == pytest.approx(15.6, abs=0.05)


def test_an_optimizer_over_the_link() -> None:
    states = 70e9 * (4 + optimizer_bytes("adamw"))
    assert states == 840 * GB
    assert round(states / H200.pcie_bytes_per_s) == 13
    assert 140 * GB / H200.pcie_bytes_per_s == pytest.approx(2.2, abs=0.05)


def plan_70b(**choices: object) -> TrainingBudget:
    """Eight H200 with ZeRO-3, a sequence of 8192 each."""
    fixed = {"zero": 3, "data": 8, "shard": 8, "seq": 8192, "checkpoint": "full", "loss": "chunked"}
    return training_budget(LLAMA_70B, Configuration(**fixed, optimizer_kernel="fused", **choices), H200)


def test_gradients_decide_whether_a_70b_fits_eight_h200() -> None:
    count = LLAMA_70B.parameters
    assert float(model_states_bytes(count, gradient_bytes=0)) / GB == pytest.approx(988, abs=0.5)
    assert float(model_states_bytes(count)) / GB == pytest.approx(1129, abs=0.5)
    assert 8 * H200.memory_bytes / GB == pytest.approx(1201, abs=0.5)

    found = plan_70b(framework="deepspeed")
    extra = {"gathered parameters", "reduce bucket", "the head's gradient"}
    states = sum(float(t.size_bytes) for t in found.terms if t.category in STATES and t.name not in extra)

    assert states == pytest.approx(float(model_states_bytes(count, zero=3, ranks=8)))
    assert states < H200.memory_bytes < found.total_bytes


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"framework": "deepspeed"}, 170.4),
        ({"framework": "fsdp2", "precision": "bf16"}, 109.5),
        ({"framework": "fsdp2", "optimizer": "adamw-8bit"}, 129.1),
        ({"framework": "deepspeed", "optimizer_place": "host"}, 46.9),
    ],
)
def test_what_fits_instead(choices: dict[str, str], expected: float) -> None:
    found = plan_70b(**choices)
    assert float(found.total_bytes) / GB == pytest.approx(expected, abs=0.5)
    assert (found.total_bytes <= H200.memory_bytes) == (expected < 150)


def test_the_host_memory_of_an_offloaded_optimizer() -> None:
    found = plan_70b(framework="deepspeed", optimizer_place="host")
    assert float(found.host_bytes) / GB == pytest.approx(123, abs=0.5)
    assert bytes_of(Category.OPTIMIZER_STATES, found.terms) == 0

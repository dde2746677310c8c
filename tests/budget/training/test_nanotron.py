"""What nanotron keeps that others do not: rule by rule, and all of it against its tensors, replayed one by one."""

import pytest

from budget.decoders import llama
from budget.nanotron_step import GIB, Step
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import training_budget
from tonnage.budget.training.nanotron import NanotronTerms, nanotron_terms
from tonnage.budget.training.states import stages
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import ModelShape

# The 1B of the Ultra-Scale Playbook.
SHAPE = llama(vocab_size=131072, num_key_value_heads=32)
EMBEDDING = 131072 * 2048
CUBLAS = 64 * 2**20


def nanotron(**choices: object) -> Configuration:
    return Configuration(framework="nanotron", optimizer_kernel="fused", **choices)  # type: ignore[arg-type]


def terms(shape: ModelShape, configuration: Configuration) -> NanotronTerms:
    return nanotron_terms(next(stages(shape, configuration)))


def test_buffers_for_what_is_gathered() -> None:
    ((two,), (none,)) = (terms(SHAPE, nanotron(tp=tp)).buffers for tp in (2, 1))
    assert (two.size_bytes, none.size_bytes) == (2 * 2 * 2048 * 4096, 0)
    assert not terms(SHAPE, Configuration(tp=2)).buffers


def test_gradients_wait_in_16_bits_for_the_end_of_the_backward_pass() -> None:
    apart = llama(vocab_size=131072, tie_word_embeddings=False)
    for shape, late in ((SHAPE, 0), (apart, EMBEDDING)):
        found = terms(shape, nanotron())
        (before,), (after,) = found.made, found.made_at_end
        assert after.size_bytes == 2 * shape.parameters
        assert after.size_bytes - before.size_bytes == 2 * late
    assert not terms(SHAPE, Configuration(framework="megatron")).made_at_end


def test_zero_gathers_through_flat_copies() -> None:
    found = terms(SHAPE, nanotron(zero=1, data=8, shard=8))
    (cached, _), (used,) = found.held, found.gathering
    assert cached.size_bytes == used.size_bytes == pytest.approx((2 + 1 / 8) * 2 * SHAPE.parameters)
    assert (cached.category, used.category) == (Category.FRAGMENTATION, Category.WORKSPACE)
    assert not terms(SHAPE, nanotron(data=8)).gathering


@pytest.mark.parametrize(
    ("choices", "tensors"),
    [({"tp": 1}, 0), ({"tp": 2}, 2 * (16 + 15)), ({"tp": 2, "pp": 4, "accumulate": 8}, 2 * (24 + 6))],
)
def test_what_is_scattered_is_lost_until_the_card_has_come_to_it(choices: dict[str, int], tensors: int) -> None:
    """Two of every block in the queue: sixteen forward, or six for each of four micro-batches; then some backward."""
    (held,) = terms(SHAPE, nanotron(**choices)).held
    assert held.size_bytes == tensors * 2 * 2048 * 4096
    assert held.category is Category.FRAGMENTATION
    assert not terms(SHAPE, Configuration(framework="megatron", tp=2)).held


def test_the_host_is_no_further_ahead_than_its_queue_holds() -> None:
    deep = llama(vocab_size=131072, num_hidden_layers=80)
    (held,) = terms(deep, nanotron(tp=2, seq=1)).held
    assert held.size_bytes == 2 * (1024 // 29) * 2 * 2048


CASES = [
    {"data": 16},
    {"data": 8, "micro_batch": 2},
    {"data": 2, "pp": 4, "accumulate": 8},
    {"tp": 2, "pp": 4, "accumulate": 8, "micro_batch": 8},
    {"tp": 8, "zero": 1, "data": 2, "micro_batch": 2},
    {"pp": 2, "accumulate": 4, "zero": 1, "data": 8},
]


def replayed(shape: ModelShape, configuration: Configuration) -> tuple[int, int]:
    """Allocated and reserved of the first stage."""
    c, stage = configuration, next(iter(stages(shape, configuration)))
    step = Step(
        hidden=2048,
        ffn=8192,
        heads=32,
        vocab=131072,
        layers=round(float(stage.share) * 16),
        has_head=bool(stage.heads),
        tied=shape.tied,
        tokens=int(c.micro_batch * c.seq),
        tp=int(c.tp),
        data=int(c.data),
        zero=c.zero,
        in_flight=int(stage.in_flight),
        micro_batches=int(c.accumulate),
    )
    return step.peaks()


@pytest.mark.parametrize("choices", CASES, ids=str)
def test_formulas_and_tensors_agree(choices: dict[str, int]) -> None:
    configuration = nanotron(**choices | {"shard": choices.get("data", 1)})
    found = training_budget(SHAPE, configuration, find_gpu("h100"), stage="first")
    allocated, reserved = replayed(SHAPE, configuration)
    assert float(found.peak_allocated_bytes) - CUBLAS == pytest.approx(allocated, rel=0.01)
    # The replay has one stream.
    held = sum(float(term.size_bytes) for term in found.terms if term.name == "held for NCCL's stream")
    assert float(found.peak_reserved_bytes) - held - CUBLAS == pytest.approx(reserved, rel=0.17)


def test_a_published_run_tensor_by_tensor() -> None:
    """16 replicas with a sequence each reported 36.66 GiB."""
    _, reserved = replayed(SHAPE, nanotron(data=16, shard=16, accumulate=2))
    assert reserved / GIB == pytest.approx(36.66, abs=0.05)

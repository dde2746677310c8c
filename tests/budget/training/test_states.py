"""What is kept for each parameter, by framework, optimizer and ZeRO stage."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.decoders import bytes_of, llama
from tonnage.budget.terms import total
from tonnage.budget.training.adapters import ALL_LINEAR
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.states import lora_parameters, model_states_bytes, optimizer_bytes, stages
from tonnage.ledger import Category

SHAPE = llama(tie_word_embeddings=False)
COUNT = SHAPE.parameters


def bytes_each(**choices: object) -> dict[Category, float]:
    """Bytes a parameter, by category, on one GPU."""
    configuration = Configuration(**choices)
    (found,) = stages(SHAPE, configuration)
    terms = (*found.kept, found.gradients)
    return {category: float(bytes_of(category, terms)) / COUNT for category in Category}


@pytest.mark.parametrize(
    ("framework", "precision", "parameter", "gradient", "optimizer"),
    [
        ("torch", "fp32", 4, 4, 8),
        ("torch", "bf16-mixed", 4, 4, 8),
        ("torch", "bf16", 2, 2, 4),
        ("fsdp2", "bf16-mixed", 4, 4, 8),
        ("deepspeed", "bf16-mixed", 2, 2, 12),
        ("megatron", "bf16-mixed", 2, 4, 12),
        ("megatron", "fp8", 2, 4, 12),
        ("nanotron", "bf16-mixed", 2, 4, 12),
    ],
)
def test_bytes_a_parameter(framework: str, precision: str, parameter: int, gradient: int, optimizer: int) -> None:
    found = bytes_each(framework=framework, precision=precision)

    assert found[Category.PARAMETERS] == pytest.approx(parameter)
    assert found[Category.GRADIENTS] == pytest.approx(gradient)
    assert found[Category.OPTIMIZER_STATES] == pytest.approx(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("sgd", 0), ("momentum", 4), ("adam", 8), ("adamw", 8), ("adamw-8bit", 2 + 8 / 256), ("lion", 4)],
)
def test_optimizer_states_in_fp32(optimizer: str, expected: float) -> None:
    assert optimizer_bytes(optimizer) == pytest.approx(expected)
    assert bytes_each(precision="fp32", optimizer=optimizer)[Category.OPTIMIZER_STATES] == pytest.approx(expected)


def test_adafactor_keeps_rows_and_columns() -> None:
    rows_and_columns = SHAPE.decoder.layers[0].feed_forward
    assert rows_and_columns is not None
    hidden, width = 2048, 8192
    block = (hidden + 2048) * 2 + (hidden + 512) * 2 + 3 * (hidden + width)
    factors = 16 * block + 2 * (128256 + hidden)

    found = bytes_each(precision="fp32", optimizer="adafactor")[Category.OPTIMIZER_STATES]

    assert found * COUNT == pytest.approx(4 * factors)


def test_muon_trains_embeddings_with_adamw() -> None:
    outside = 2 * 128256 * 2048 + 2048
    found = bytes_each(precision="fp32", optimizer="muon")[Category.OPTIMIZER_STATES] * COUNT
    assert found == pytest.approx(4 * (COUNT - outside) + 8 * outside)


@pytest.mark.parametrize(("zero", "expected"), [(0, 120e9), (1, 31.4e9), (2, 16.6e9), (3, 1.88e9)])
def test_the_table_of_the_zero_paper(zero: int, expected: float) -> None:
    assert model_states_bytes(7_500_000_000, zero=zero, ranks=64) == pytest.approx(expected, rel=0.005)


@given(zero=st.integers(0, 2), ranks=st.integers(1, 4096), parameters=st.integers(1, 10**12))
def test_a_higher_stage_never_needs_more(zero: int, ranks: int, parameters: int) -> None:
    lower = model_states_bytes(parameters, zero=zero, ranks=ranks)
    assert model_states_bytes(parameters, zero=zero + 1, ranks=ranks) <= lower


@given(zero=st.integers(0, 3), framework=st.sampled_from(["torch", "fsdp2", "deepspeed", "megatron"]))
def test_more_shards_never_need_more(zero: int, framework: str) -> None:
    sizes = []
    for shard in (1, 2, 8, 64):
        configuration = Configuration(framework=framework, zero=zero, data=64, shard=shard)
        (found,) = stages(SHAPE, configuration)
        sizes.append(float(total((*found.kept, found.gradients))))
    assert sizes == sorted(sizes, reverse=True)


def test_adapters_alone_are_trained() -> None:
    configuration = Configuration(lora_rank=16)
    (found,) = stages(SHAPE, configuration)
    adapters, _ = lora_parameters(SHAPE, 16, ALL_LINEAR)

    sizes = {term.name: float(term.size_bytes) for term in found.kept}

    assert sizes["frozen parameters"] == 2 * COUNT
    assert sizes["adapters"] == found.gradients.size_bytes == 4 * adapters
    assert sizes["adamw states"] == 8 * adapters


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.127), ("nf4-single", 4.5), ("fp8", 8.0)])
def test_blocks_of_the_base_are_kept_in_few_bits_and_the_rest_in_16(base: Any, bits: float) -> None:
    configuration = Configuration(lora_rank=8, base=base)
    (stage,) = stages(SHAPE, configuration)
    sizes = {term.name: float(term.size_bytes) for term in stage.kept}
    outside = 2 * 128256 * 2048 + 2048 * (1 + 2 * 16)

    assert sizes[f"frozen blocks in {base.upper()}"] == pytest.approx(bits / 8 * (COUNT - outside), rel=1e-4)
    assert sizes["frozen embeddings, norms and head"] == pytest.approx(2 * outside)


def test_lora_on_queries_and_values() -> None:
    assert lora_parameters(SHAPE, 8, ("q_proj", "v_proj")) == (16 * 8 * ((2048 + 2048) + (2048 + 512)), 0)

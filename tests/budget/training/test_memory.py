"""The whole budget: what it sums, how it moves, and how near it is to what the virtual GPU does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.decoders import bytes_of, gpt2, llama
from tonnage.budget.terms import total
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model, from_config
from virtual_runs import run_tonnage

TRUTH = Path(__file__).parents[3] / "benchmarks" / "truth"
H200 = find_gpu("h200")
SHAPE = llama()
MIB = 2**20

CONFIGURATIONS = st.builds(
    Configuration,
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16", "fp8"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw", "adamw-8bit", "adafactor", "lion", "muon"]),
    optimizer_kernel=st.sampled_from(["foreach", "fused", "loop"]),
    checkpoint=st.sampled_from(["none", "selective", "full", "every-4"]),
    attention=st.sampled_from(["flash", "eager"]),
    loss=st.sampled_from(["full", "chunked"]),
    framework=st.sampled_from(["torch", "fsdp2", "deepspeed", "megatron", "nanotron"]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    optimizer_place=st.sampled_from(["gpu", "host", "nvme"]),
    parameter_place=st.sampled_from(["gpu", "host", "nvme"]),
    activation_place=st.sampled_from(["gpu", "host"]),
    lora_rank=st.sampled_from([0, 0, 16]),
    compile=st.booleans(),
    seq=st.sampled_from([512, 2048]),
    micro_batch=st.integers(1, 8),
    accumulate=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    data=st.just(8),
    shard=st.sampled_from([1, 2, 8]),
)


def budget(configuration: Configuration) -> TrainingBudget:
    """Of the small Llama on an H200."""
    return training_budget(SHAPE, configuration, H200)


@given(CONFIGURATIONS)
@settings(max_examples=150)
def test_the_terms_are_the_total(configuration: Configuration) -> None:
    found = budget(configuration)

    assert all(float(term.size_bytes) >= 0 for term in found.terms)
    assert found.total_bytes == pytest.approx(sum(float(term.size_bytes) for term in found.terms))
    assert found.ledger_at(0).total_bytes == pytest.approx(found.total_bytes, abs=len(found.terms))
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.total_bytes
    assert 0 <= found.pinned_bytes <= found.host_bytes


@given(CONFIGURATIONS, st.sampled_from(["micro_batch", "seq"]))
@settings(max_examples=100)
def test_more_work_never_needs_less(configuration: Configuration, number: str) -> None:
    doubled = replace(configuration, **{number: 2 * getattr(configuration, number)})
    assert budget(doubled).total_bytes >= budget(configuration).total_bytes


# Nanotron gathers what it shards through copies that may be larger than what sharding saves.
@given(CONFIGURATIONS.filter(lambda configuration: configuration.framework != "nanotron"))
@settings(max_examples=100)
def test_more_shards_never_need_more(configuration: Configuration) -> None:
    one, eight = (budget(replace(configuration, shard=shard)).total_bytes for shard in (1, 8))
    assert eight <= one


@given(CONFIGURATIONS.filter(lambda configuration: configuration.activation_place == "gpu"))
@settings(max_examples=100)
def test_recomputing_more_never_needs_more(configuration: Configuration) -> None:
    full, selective, none = (
        budget(replace(configuration, checkpoint=way)).total_bytes for way in ("full", "selective", "none")
    )
    assert full <= selective * 1.0001
    assert selective <= none * 1.0001


@given(st.lists(CONFIGURATIONS, min_size=1, max_size=1), st.integers(2, 6))
@settings(max_examples=60)
def test_many_at_once_are_each_as_alone(chosen: list[Configuration], count: int) -> None:
    (family,) = chosen
    numbers = {
        "micro_batch": 1 + np.arange(count),
        "accumulate": 1 + np.arange(count) % 3,
        "pp": 2 ** (np.arange(count) % 3),
        "tp": 2 ** (np.arange(count) % 2),
    }
    many = replace(family, **numbers)

    together = budget(many)

    for index in range(count):
        alone = budget(many.at(index))
        assert together.total_bytes[index] == pytest.approx(alone.total_bytes)
        assert together.ledger_at(index).total_bytes == pytest.approx(alone.ledger_at(0).total_bytes, abs=40)
        assert together.moment_at(index).split(",")[0] == alone.moment_at(0).split(",")[0]


def test_every_term_explains_itself() -> None:
    configuration = Configuration(framework="fsdp2", zero=3, data=8, shard=8, pp=2, tp=2, accumulate=4)
    for term in budget(configuration).terms_at(0):
        assert term.formula
        assert term.source
        assert all(np.ndim(value) == 0 for value in term.numbers.values())


def test_foreach_needs_one_more_set_of_states() -> None:
    small = {"precision": "bf16", "seq": 128, "micro_batch": 1}
    foreach = budget(Configuration(**small))
    temporaries = next(term for term in foreach.terms if term.name == "foreach temporaries")
    assert foreach.moment_at(0) == "optimizer, stage"
    assert temporaries.size_bytes == 2 * SHAPE.parameters
    assert budget(Configuration(**small, optimizer_kernel="fused")).total_bytes < foreach.total_bytes


def test_the_loss_dominates_a_large_vocabulary() -> None:
    full, chunked = (
        bytes_of(Category.ACTIVATIONS, budget(Configuration(precision="bf16", seq=8192, loss=loss)).terms)
        for loss in ("full", "chunked")
    )
    # Chunks sum up the gradient of what the head reads.
    assert full - chunked == pytest.approx(12 * 128256 * 8192 * 7 / 8 - 2 * 2048 * 8192)


def test_offload_moves_states_to_the_host() -> None:
    place = {"framework": "deepspeed", "zero": 3, "data": 8, "shard": 8}
    stays, moved = (budget(Configuration(**place, optimizer_place=where)) for where in ("gpu", "host"))
    count = SHAPE.parameters

    assert bytes_of(Category.OPTIMIZER_STATES, stays.terms) == pytest.approx(12 * count / 8)
    assert bytes_of(Category.OPTIMIZER_STATES, moved.terms) == 0
    assert stays.host_bytes == 0
    assert moved.host_bytes == pytest.approx((12 + 2) * count / 8)
    assert moved.pinned_bytes == pytest.approx(2 * count / 8)


def test_nvme_leaves_buffers_in_host_memory() -> None:
    large = training_budget(
        llama(num_hidden_layers=64), Configuration(framework="deepspeed", optimizer_place="nvme"), H200
    )
    gradients = 2 * llama(num_hidden_layers=64).parameters
    # Two kinds of states, each through five buffers of 100 million FP32 numbers.
    assert large.host_bytes == pytest.approx(2 * 5 * 4e8 + gradients)


def test_pipelines_report_their_worst_stage() -> None:
    # A deep pipeline of a model with a small vocabulary keeps most in its first stage; a large one in its last.
    deep = Configuration(framework="megatron", pp=4, accumulate=16, micro_batch=4)
    assert training_budget(llama(vocab_size=1000), deep, H200).moment_at(0).endswith("first stage")
    wide = Configuration(framework="torch", precision="bf16", pp=2, accumulate=2, micro_batch=8)
    assert training_budget(llama(vocab_size=512_000), wide, H200).moment_at(0).endswith("last stage")
    one, other = (training_budget(SHAPE, deep, H200, stage=end).total_bytes for end in ("first", "last"))
    assert budget(deep).total_bytes == pytest.approx(max(one, other))


def test_context_parallelism_divides_activations() -> None:
    alone, shared = (
        bytes_of(Category.ACTIVATIONS, budget(Configuration(framework="megatron", seq=8192, cp=cp)).terms)
        for cp in (1, 4)
    )
    assert shared == pytest.approx(alone / 4)


# -- what the virtual GPU does


@pytest.mark.parametrize(
    ("words", "shape", "choices"),
    [
        pytest.param(
            "--size llama-1b --batch 3 --seq 640 --precision bf16",
            llama(),
            {"precision": "bf16"},
            marks=pytest.mark.slow,  # a step as the two others have it, with nothing besides
        ),
        ("--size llama-1b --batch 3 --seq 640 --precision amp-bf16 --checkpoint", llama(), {"checkpoint": "full"}),
        (
            "--size gpt2 --batch 3 --seq 640 --precision fp32 --accumulate 2",
            gpt2(),
            {"precision": "fp32", "accumulate": 2},
        ),
    ],
)
def test_what_no_one_measured_the_virtual_gpu_tells(
    words: str, shape: Any, choices: dict[str, Any], tmp_path: Path
) -> None:
    script, answer = TRUTH / "scripts" / "lm_train.py", tmp_path / "answer.json"
    run_tonnage("run", "--gpu", "h200", "--torch", "2.11", "--json", str(answer), str(script), *words.split())
    virtual = json.loads(answer.read_text())["peak_allocated_bytes"]

    found = training_budget(shape, Configuration(seq=640, micro_batch=3, **choices), H200)

    assert float(found.peak_allocated_bytes) == pytest.approx(virtual, rel=0.01)


def test_totals_of_terms_are_sums() -> None:
    found = budget(Configuration())
    assert total(found.terms) == found.total_bytes


def test_wide_logits_are_held_beside_the_loss() -> None:
    shape, asked = llama(), Configuration(precision="bf16", checkpoint="full", seq=2048, micro_batch=8)
    narrow, wide = (
        float(training_budget(shape, replace(asked, wide_logits=wide), find_gpu("h200")).peak_allocated_bytes)
        for wide in (False, True)
    )
    assert wide - narrow == 4 * shape.vocab * 8 * 2048


@pytest.mark.truth
@pytest.mark.parametrize(
    ("config", "batch", "seq", "measured_gib"),
    [
        ({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 4, 2048, 24.91),
        ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
          "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
          "tie_word_embeddings": True}, 4, 4096, 38.87),
        ({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}, 8, 1024, 10.92),
    ],
)  # fmt: skip
def test_compiled_models_on_an_h200(config: dict[str, Any], batch: int, seq: int, measured_gib: float) -> None:
    """Zeros stand for the gradient of their logits, and a mask has heads of keys repeated."""
    configuration = Configuration(precision="bf16", compile=True, micro_batch=batch, seq=seq, optimizer_kernel="fused")
    budget = training_budget(from_config(config, "model"), configuration, find_gpu("h200"))
    assert float(budget.peak_allocated_bytes) / 2**30 == pytest.approx(measured_gib, rel=0.02)


def test_a_learned_bias_has_no_fused_attention() -> None:
    """T5's: the softmax, its dropout and the mask of that in FP32, in self-attention alone."""
    shape = find_model("t5-base")
    short, long = (Configuration(precision="bf16", micro_batch=1, seq=seq) for seq in (512, 1024))
    kept = [
        next(
            float(t.size_bytes)
            for t in training_budget(shape, c, find_gpu("h200")).terms
            if t.name == "kept by attention"
        )
        for c in (short, long)
    ]
    scores = 24 * 12 * (4 + 4 + 1)
    assert kept[1] - 2 * kept[0] == scores * (1024**2 - 2 * 512**2)

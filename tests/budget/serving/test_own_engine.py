"""Tonnage's own engine: bytes of a block, of its weights and of its reserve; a plan and a start agree."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_shapes import LLAMA_8B, attention, latent, layer, model, own_options
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.budget.serving.own_engine import (
    FAMILIES,
    ModelWidths,
    own_block_bytes,
    own_card,
    own_reserve,
    own_weight_terms,
    share_bytes,
    widths_of,
)
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import all_presets, find_model
from tonnage.models.shape import AttentionKind

H200 = find_gpu("h200")
LIMITS = own_options(context=4096)
WIDTHS = widths_of(LLAMA_8B)
SERVED = [name for name in all_presets() if find_model(name).architecture in FAMILIES and find_model(name).logits]


def weight_bytes(name: str, weights: str) -> int:
    return sum(int(term.size_bytes) for term in own_weight_terms(find_model(name), weights))


def reserve_bytes(widths: ModelWidths, limits: ServingConfiguration) -> int:
    return sum(int(term.size_bytes) for term in own_reserve(widths, limits, H200))


def test_a_block_is_a_page_of_keys_and_values_in_every_layer() -> None:
    assert own_block_bytes(WIDTHS, "bf16") == 32 * 2 * 16 * 8 * 128 * 2
    assert own_block_bytes(WIDTHS, "fp8") == 32 * 2 * 16 * 8 * (128 + 2)
    assert own_block_bytes(WIDTHS, "bf16", 64) == 4 * own_block_bytes(WIDTHS, "bf16")


def test_windows_keep_full_pages() -> None:
    sliding = attention(kind=AttentionKind.SLIDING, window=1024)
    mixed = replace(model([layer(sliding), layer(attention())] * 16), architecture="gemma3_text")
    plain, windows = (
        serving_budget(each, ServingConfiguration(engine="tonnage"), H200).kv.layout for each in (LLAMA_8B, mixed)
    )
    assert windows == plain


@pytest.mark.parametrize("name", [name for name in SERVED if len(find_model(name).stacks) == 1])
def test_weights_are_all_parameters_and_a_tied_head_once(name: str) -> None:
    assert weight_bytes(name, "bf16") == 2 * find_model(name).parameters
    assert weight_bytes(name, "fp32") == 4 * find_model(name).parameters


def test_eight_bits_leave_embedding_head_and_norms() -> None:
    # Qwen3-0.6B: 28 layers of width 1024, 16 and 8 heads of 128, MLP 3072, a tied head.
    matrices = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    outputs = 28 * (2048 + 2 * 1024 + 1024 + 2 * 3072 + 1024)
    rest = find_model("qwen3-0.6b").parameters - matrices
    assert rest == 151936 * 1024 + 28 * (2 * 1024 + 2 * 128) + 1024
    assert weight_bytes("qwen3-0.6b", "int8") == weight_bytes("qwen3-0.6b", "fp8") == matrices + 4 * outputs + 2 * rest


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("weights", "kv"), [("bf16", "bf16"), ("fp8", "fp8")])
def test_a_plan_and_a_start_give_the_same_blocks(name: str, weights: str, kv: str) -> None:
    shape, gpu = find_model(name), find_gpu("b300")
    asked = ServingConfiguration(
        engine="tonnage", context=4096, weights=weights, kv=kv, max_seqs=64, batched_tokens=2048, utilization=0.85
    )
    planned = serving_budget(shape, asked, gpu)
    limits = own_options(context=4096, weights=weights, kv=kv, max_seqs=64, batched_tokens=2048)
    started = own_card(
        widths_of(shape), limits, gpu, name=gpu.name, capacity_bytes=gpu.memory_bytes,
        limit_bytes=share_bytes(gpu.memory_bytes, 0.85), weight_bytes=weight_bytes(name, weights),
    )  # fmt: skip
    assert (started.pool.blocks, started.pool.block_bytes) == (planned.kv.blocks, planned.kv.layout.bytes_per_block)
    assert started.pool.tokens == planned.kv.tokens
    if started.pool.blocks:
        assert started.total_bytes == planned.total_bytes <= started.limit_bytes
        assert started.limit_bytes - started.total_bytes < started.pool.block_bytes


def test_a_card_s_ledger_sums_to_the_card() -> None:
    card = own_card(
        WIDTHS, LIMITS, H200, name="card", capacity_bytes=H200.memory_bytes, limit_bytes=100 * 2**30,
        weight_bytes=16 * 2**30,
    )  # fmt: skip
    kinds = (Category.ACTIVATIONS, Category.WORKSPACE, Category.CONTEXT)
    assert sum(card.reserved_for(kind) for kind in kinds) == card.reserve_bytes
    assert card.weight_bytes + card.pool.size_bytes + card.reserve_bytes + card.left_bytes == card.capacity_bytes
    assert 0 < card.reserved_for(Category.WORKSPACE, "CUDA graphs") < card.reserved_for(Category.WORKSPACE)


def test_the_cpu_has_no_graphs_and_no_context() -> None:
    assert {term.name for term in own_reserve(WIDTHS, LIMITS, None)} == {"peak of a step", "buffers"}


def test_eager_has_no_graphs() -> None:
    graphs = next(t for t in own_reserve(WIDTHS, replace(LIMITS, eager=True), H200) if t.name == "CUDA graphs")
    assert graphs.size_bytes == 0
    assert reserve_bytes(WIDTHS, replace(LIMITS, eager=True)) < reserve_bytes(WIDTHS, LIMITS)


def test_a_share_too_small_leaves_no_blocks() -> None:
    asked = ServingConfiguration(engine="tonnage", utilization=0.01)
    budget = serving_budget(LLAMA_8B, asked, H200)
    assert (budget.kv.blocks, budget.kv.usable_blocks, budget.fits) == (0, 0, False)


@pytest.mark.parametrize(
    "shape",
    [
        replace(LLAMA_8B, architecture="deepseek_v3"),
        model([layer(latent())] * 2),
        model([layer(None)] * 2),
        model([layer(attention()), layer(attention(head_dim=64))]),
        replace(LLAMA_8B, stacks=LLAMA_8B.stacks * 2),
    ],
    ids=["family", "latent", "no attention", "two sizes of heads", "an encoder"],
)
def test_what_the_engine_does_not_serve_is_refused(shape: object) -> None:
    with pytest.raises(RequestError, match="does not serve") as error:
        widths_of(shape)  # type: ignore[arg-type]
    assert "--engine vllm" in error.value.hint


@given(
    tokens=st.integers(1, 65536),
    seqs=st.integers(1, 2048),
    context=st.integers(1, 2**20),
    weights=st.sampled_from(["bf16", "fp8", "fp32"]),
)
def test_the_reserve_grows_with_every_limit(tokens: int, seqs: int, context: int, weights: str) -> None:
    limits = own_options(context=context, max_seqs=seqs, batched_tokens=tokens, weights=weights)
    held = reserve_bytes(WIDTHS, limits)
    for larger in ({"context": 2 * context}, {"max_seqs": seqs + 1}, {"batched_tokens": tokens + 1}):
        assert reserve_bytes(WIDTHS, replace(limits, **larger)) >= held  # type: ignore[arg-type]

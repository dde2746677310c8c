"""The budget of serving: its ledger, who fits, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_shapes import LLAMA_8B, LLAMA_70B, layer, model
from tonnage.budget.serving.memory import ServingConfiguration, divides, serving_budget
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import all_presets, find_model
from tonnage.models.shape import LayerStack

H100, L4 = find_gpu("h100"), find_gpu("l4")
ASKED = ServingConfiguration(context=4096, users=8)
OWN = replace(ASKED, engine="tonnage")


@pytest.mark.parametrize("asked", [ASKED, OWN], ids=["vllm", "tonnage"])
def test_terms_sum_to_the_ledger_and_stay_within_the_card(asked: ServingConfiguration) -> None:
    budget = serving_budget(LLAMA_8B, asked, H100)
    assert budget.ledger.total_bytes == budget.total_bytes <= budget.capacity_bytes
    assert budget.ledger[Category.KV_CACHE] == budget.kv.blocks * budget.kv.layout.bytes_per_block
    slack = budget.limit_bytes + budget.outside_bytes - budget.total_bytes
    assert 0 <= slack < budget.kv.layout.bytes_per_block
    assert all(term.formula for term in budget.terms)


def test_our_engine_counts_its_context() -> None:
    budget = serving_budget(LLAMA_8B, OWN, H100)
    assert (budget.outside_bytes, budget.configuration.utilization) == (0, 0.9)


@pytest.mark.parametrize("asked", [ASKED, OWN], ids=["vllm", "tonnage"])
@pytest.mark.parametrize("prefix", [0, 1000])
def test_most_users_and_longest_context_are_the_edge(asked: ServingConfiguration, prefix: int) -> None:
    kv = serving_budget(LLAMA_8B, asked, H100).kv
    users = kv.most_users(4096, prefix)
    assert kv.holds(users, 4096, prefix) and not kv.holds(users + 1, 4096, prefix)
    context = kv.longest_context(50, prefix)
    assert kv.holds(50, context, prefix) and not kv.holds(50, context + 1, prefix)


def test_a_null_block_is_kept() -> None:
    kv = serving_budget(LLAMA_8B, ASKED, H100).kv
    assert kv.blocks - kv.usable_blocks == 1
    assert not kv.holds(1, kv.blocks * 16)


def test_needed_bytes_say_whether_it_fits() -> None:
    fitting = serving_budget(LLAMA_8B, ASKED, H100)
    most = fitting.kv.most_users(4096)
    for users in (most, most + 1):
        budget = serving_budget(LLAMA_8B, replace(ASKED, users=users, max_seqs=1024), H100)
        assert budget.fits == (budget.needed_bytes <= budget.available_bytes) == (users == most)


def test_a_model_that_is_too_large_has_no_blocks() -> None:
    budget = serving_budget(LLAMA_70B, ASKED, L4)
    assert (budget.kv.blocks, budget.kv.tokens, budget.fits) == (0, 0, False)
    assert (budget.kv.most_users(4096), budget.kv.longest_context(1)) == (0, 0)


def test_the_pool_is_that_of_the_fullest_stage() -> None:
    each = [serving_budget(LLAMA_70B, replace(ASKED, pp=pp), H100).kv.blocks for pp in (4, 8)]
    assert 0 < each[0] < each[1]


def test_more_users_than_the_default_raise_it() -> None:
    assert serving_budget(LLAMA_8B, replace(ASKED, users=2000), H100).configuration.max_seqs == 2000
    assert "fewer sequences" in serving_budget(LLAMA_8B, replace(ASKED, users=9, max_seqs=8), H100).notes[0]


def test_fp32_and_fp16_set_the_cache() -> None:
    kept = {
        name: serving_budget(LLAMA_8B, replace(ASKED, weights=name), H100).configuration.kv for name in ("fp32", "fp16")
    }
    assert kept == {"fp32": "fp32", "fp16": "fp16"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"users": 0}, "--users 0"),
        ({"context": 0}, "--context 0"),
        ({"context": 10**20}, "beyond counting"),
        ({"users": 10**12}, "beyond counting"),
        ({"tp": 3}, "--tp 3 does not divide"),
        ({"tp": 64}, "--tp 64 does not divide"),
        ({"pp": 33}, "only 32 layers"),
        ({"block": 0}, "--block 0"),
        ({"utilization": 1.5}, "--utilization 1.5"),
        ({"max_seqs": -1}, "--max-seqs -1"),
        ({"shared_prefix": 5000}, "prefix of 5000"),
        ({"weights": "int3"}, "--weights int3"),
        ({"kv": "int3"}, "--kv int3"),
        ({"kv": "int4", "engine_version": "0.19"}, "no INT4"),
        ({"engine_version": "x"}, "version"),
        ({"engine": "tonnage", "tp": 2}, "one GPU"),
        ({"engine": "tonnage", "weights": "int4"}, "keeps no int4 weights"),
        ({"engine": "tonnage", "kv": "int4"}, "keeps no int4 cache"),
    ],
)
def test_nonsense_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        serving_budget(LLAMA_8B, replace(ASKED, **changed), H100)  # type: ignore[arg-type]
    assert error.value.hint


def test_an_encoder_is_not_served() -> None:
    stack = LLAMA_8B.stacks[0]
    encoder = replace(LLAMA_8B, stacks=(LayerStack(layers=stack.layers, hidden=stack.hidden, causal=False),))
    with pytest.raises(RequestError, match="writes no tokens"):
        serving_budget(encoder, ASKED, H100)


def test_heads_split_or_ranks_do() -> None:
    assert [tp for tp in range(1, 65) if divides(LLAMA_70B, tp)] == [1, 2, 4, 8, 16, 32, 64]


def test_a_model_without_attention_is_served_without_a_pool() -> None:
    assert serving_budget(model([layer(None)] * 2), ASKED, H100).kv.tokens == 0


@pytest.mark.parametrize("name", all_presets())
def test_every_preset_gets_an_answer_or_a_reason(name: str) -> None:
    try:
        shape = find_model(name)
        context = min(shape.max_positions or ASKED.context, ASKED.context)
        budget = serving_budget(shape, replace(ASKED, weights="int4", context=context), find_gpu("b300"))
    except RequestError as error:
        assert "writes no tokens" in str(error)
        return
    assert budget.ledger.total_bytes == budget.total_bytes
    assert budget.needed_bytes > 0 and budget.kv.layout.bytes_per_block > 0


@settings(max_examples=60)
@given(
    share=st.floats(0.3, 0.9),
    seqs=st.integers(1, 512),
    tokens=st.integers(512, 16384),
    kept=st.one_of(
        st.tuples(st.just("vllm"), *[st.sampled_from(["bf16", "fp8", "int4"])] * 2),
        st.tuples(st.just("tonnage"), *[st.sampled_from(["bf16", "fp8"])] * 2),
    ),
)
def test_more_of_the_card_means_more_blocks(share: float, seqs: int, tokens: int, kept: tuple[str, str, str]) -> None:
    engine, kv, weights = kept
    asked = ServingConfiguration(
        engine=engine, utilization=share, max_seqs=seqs, batched_tokens=tokens, kv=kv, weights=weights
    )  # type: ignore[arg-type]  # fmt: skip
    blocks = serving_budget(LLAMA_8B, asked, H100).kv.blocks
    assert serving_budget(LLAMA_8B, replace(asked, utilization=share + 0.05), H100).kv.blocks >= blocks
    assert serving_budget(LLAMA_8B, replace(asked, max_seqs=seqs + 1), H100).kv.blocks <= blocks
    assert serving_budget(LLAMA_8B, replace(asked, batched_tokens=tokens + 64), H100).kv.blocks <= blocks

"""The passing memory of inference, term by term."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_shapes import LLAMA_8B, attention, latent, layer, model
from tonnage.budget.serving.forward import (
    ForwardPass,
    expert_bytes,
    forward_bytes,
    graph_sizes,
    sampler_bytes,
)
from tonnage.budget.serving.weights import stages

STAGE = stages(LLAMA_8B, 1)[0]


def test_a_forward_pass_holds_gate_up_their_product_and_what_is_held() -> None:
    at = ForwardPass(tokens=8192, sequences=1, tp=1, compute_bytes=2)
    assert forward_bytes(LLAMA_8B, STAGE, at, held=4) == 8192 * (3 * 14336 + 4 * 4096) * 2


def test_ranks_split_the_layer_and_not_what_is_held() -> None:
    at = ForwardPass(tokens=100, sequences=1, tp=4, compute_bytes=2)
    assert forward_bytes(LLAMA_8B, STAGE, at, held=3) == 100 * (3 * 3584 + 3 * 4096) * 2


def test_a_stage_hands_its_states_on() -> None:
    at = ForwardPass(tokens=100, sequences=1, tp=1, compute_bytes=2)
    middle = forward_bytes(LLAMA_8B, stages(LLAMA_8B, 4)[1], at, held=3)
    assert middle - forward_bytes(LLAMA_8B, STAGE, at, held=3) == 100 * 2 * 4096 * 2


def test_latent_attention_can_be_the_peak() -> None:
    small = model([layer(latent(), 2048, 512)], hidden=2048)
    at = ForwardPass(tokens=1, sequences=1, tp=1, compute_bytes=2)
    expected = 3 * 2048 + 128 * (2 * 192 + 128 + 128 + 128)
    assert forward_bytes(small, stages(small, 1)[0], at, held=3) == expected * 2


def test_experts_have_two_buffers() -> None:
    mixture = model([layer(attention(), 4096, 1024, experts=8)])
    at = ForwardPass(tokens=10, sequences=1, tp=1, compute_bytes=2)
    assert expert_bytes(mixture, stages(mixture, 1)[0], at) == 10 * 2 * (4096 + 4096) * 2
    assert expert_bytes(LLAMA_8B, STAGE, at) == 0


def test_the_sampler_holds_logits_and_the_states_they_came_from() -> None:
    at = ForwardPass(tokens=8192, sequences=1024, tp=1, compute_bytes=2)
    assert sampler_bytes(LLAMA_8B, at, 14) == 1024 * 128256 * 14 + (8192 + 2048) * 4096 * 2
    assert sampler_bytes(LLAMA_8B, at, 14, rows=132) - sampler_bytes(LLAMA_8B, at, 14) == 132 * 128256 * 4


def test_fp32_logits_need_no_copy() -> None:
    half, full = (ForwardPass(tokens=0, sequences=1, tp=1, compute_bytes=size) for size in (2, 4))
    states = 2 * 4096
    assert sampler_bytes(LLAMA_8B, half, 14) - states * 2 == 128256 * 14
    assert sampler_bytes(LLAMA_8B, full, 14) - states * 4 == 128256 * 12


@pytest.mark.parametrize(("largest", "count"), [(1, 1), (4, 3), (8, 4), (256, 35), (512, 51)])
def test_sizes_of_graphs(largest: int, count: int) -> None:
    assert graph_sizes(largest) == count


@given(tokens=st.integers(1, 10**5), tp=st.sampled_from([1, 2, 4, 8]))
def test_more_tokens_take_more_and_more_ranks_take_less(tokens: int, tp: int) -> None:
    def size(count: int, ranks: int) -> int:
        return forward_bytes(LLAMA_8B, STAGE, ForwardPass(count, 1, ranks, 2), held=4)

    assert size(tokens, 2 * tp) < size(tokens, tp) < size(tokens + 1, tp)

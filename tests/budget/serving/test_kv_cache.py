"""Keys and values: bytes a token, pages, groups, and the worked examples of docs/examples.md."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_shapes import LLAMA_2_70B, LLAMA_70B, QWEN3_8B, attention, latent, layer, recurrent
from tonnage.budget.serving.kv_cache import (
    KV_FORMATS,
    KvLayout,
    average_waste,
    blocks_for,
    kv_layout,
    state_bytes,
    token_bytes,
)
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape

BF16, FP16, FP8, INT4 = (KV_FORMATS[name] for name in ("bf16", "fp16", "fp8", "int4"))
_KEPT: list[Any] = []  # libraries of operators live as long as their objects
FULL, SLIDING = attention(), attention(kind=AttentionKind.SLIDING, window=1024)


def kinds(shape: ModelShape) -> list[tuple[LayerShape, int]]:
    return list(shape.decoder.groups())


def per_token(shape: ModelShape) -> int:
    return kv_layout(kinds(shape), FP16).bytes_per_token


# Worked examples


def test_llama_3_70b_of_32_sequences_of_8192() -> None:
    size = 32 * 8192 * per_token(LLAMA_70B)
    assert size == 32 * 8192 * 80 * (2 * 8 * 128) * 2 == 85_899_345_920  # 85.9 GB
    # The 42 GB that is often quoted counts keys and forgets values.
    assert size / 2 == pytest.approx(42.9e9, rel=0.002)


def test_llama_2_70b_of_128_sequences_of_2048() -> None:
    assert 128 * 2048 * per_token(LLAMA_2_70B) == 80 * 2**30


def test_a_head_for_all_a_head_for_eight_one_head() -> None:
    sizes = [token_bytes(attention(64, heads), FP16) for heads in (64, 8, 1)]
    assert [size / sizes[0] * 100 for size in sizes] == [100, 12.5, 1.5625]


def test_200_and_3800_tokens_in_blocks_of_16() -> None:
    assert [blocks_for(200, 16), blocks_for(3800, 16)] == [13, 238]
    assert blocks_for(1, 16) == blocks_for(16, 16) == 1


def test_a_block_of_qwen3_8b() -> None:
    assert kv_layout(kinds(QWEN3_8B), BF16, block=16).bytes_per_block == 2_359_296


def test_latent_attention_of_deepseek_v3() -> None:
    assert kv_layout([(layer(latent()), 61)], BF16, tp=8).bytes_per_token == 70_272


def test_windows_of_gemma_3_27b() -> None:
    full, window = attention(32, 16), attention(32, 16, kind=AttentionKind.SLIDING, window=1024)
    layout = kv_layout([(layer(full), 10), (layer(window), 52)], BF16)
    assert (layout.bytes_per_token, layout.sequence_blocks(131072, 8192)) == (573_440, 11_654)
    assert 7 * blocks_for(131072, 16) == 57_344


# One layer


def test_formats() -> None:
    assert token_bytes(FULL, BF16) == 2 * 8 * 128 * 2
    assert token_bytes(FULL, FP8) * 2 == token_bytes(FULL, BF16)
    # Half a byte a number, and a scale and a zero point in FP16 for each vector.
    assert token_bytes(FULL, INT4) == 2 * 8 * (64 + 4)


def test_ranks_beyond_the_heads_repeat_them() -> None:
    sizes = [token_bytes(FULL, BF16, tp) for tp in (1, 2, 8, 16, 32)]
    assert sizes == [4096, 2048, 512, 512, 512]


def test_latent_attention_is_small_and_not_split() -> None:
    assert [token_bytes(latent(), BF16, tp) for tp in (1, 8)] == [(512 + 64) * 2] * 2


def test_a_state_is_split_and_knows_no_tokens() -> None:
    mixer = recurrent(1_000_000)
    assert (token_bytes(mixer, BF16), state_bytes(mixer), state_bytes(mixer, 4)) == (0, 2_000_000, 500_000)


# Layers together


def hybrid(full: int, sliding: int, **options: bool) -> KvLayout:
    return kv_layout([(layer(FULL), full), (layer(SLIDING), sliding)], BF16, **options)


@pytest.mark.parametrize(
    ("full", "sliding", "groups", "layers"),
    [(10, 52, 7, 10), (5, 29, 7, 5), (8, 40, 6, 8), (23, 23, 2, 23), (12, 13, 2, 13)],
)
def test_groups_are_as_large_as_the_rarest_kind(full: int, sliding: int, groups: int, layers: int) -> None:
    # The first three are Gemma-3 27B, 4B and 12B: 62 layers are charged as 70.
    layout = hybrid(full, sliding)
    assert (len(layout.groups), layout.bytes_per_block) == (groups, layers * 16 * 4096)
    assert layout.bytes_per_token == groups * layers * 4096


def test_a_window_keeps_itself_and_what_is_computed() -> None:
    layout = hybrid(10, 50)
    short, long = layout.sequence_blocks(512, 2048), layout.sequence_blocks(65536, 2048)
    assert short == 32 + 5 * 33
    assert long == 4096 + 5 * (-(-(1023 + 2048) // 16) + 1)


def test_without_groups_windows_keep_everything() -> None:
    layout = hybrid(10, 50, grouped=False)
    assert layout.sequence_blocks(65536, 2048) == 4096
    assert layout.bytes_per_token == 60 * 4096


def test_a_block_grows_until_it_holds_a_state() -> None:
    # Qwen3-Next on two ranks: a state of 548,864 B beside 1,024 B a token.
    full, state = layer(attention(16, 2, 256)), layer(recurrent(548_864))
    layout = kv_layout([(full, 12), (state, 36)], BF16, tp=2)
    assert (layout.block, len(layout.groups)) == (544, 4)
    assert layout.sequence_blocks(262144, 8192) == 482 + 3


def test_a_model_of_states_alone_takes_one_block_a_sequence() -> None:
    layout = kv_layout([(layer(recurrent(1000)), 24)], BF16)
    assert layout.bytes_per_block == 24 * 2000
    assert layout.sequence_blocks(10**6, 2048) == 1
    assert layout.bytes_per_token == 0


def test_a_model_without_attention_has_no_cache() -> None:
    assert kv_layout([(layer(None), 4)], BF16).groups == ()


# Sharing and waste


def test_a_shared_prefix_is_kept_once() -> None:
    layout = kv_layout([(layer(FULL), 32)], BF16)
    assert layout.needed_blocks(10, 1600, 2048) == 1000
    assert layout.needed_blocks(10, 1600, 2048, prefix=800) == 50 + 10 * 50
    # A block that is not full cannot be shared.
    assert layout.needed_blocks(10, 1600, 2048, prefix=815) == layout.needed_blocks(10, 1600, 2048, prefix=800)


def test_windows_share_nothing() -> None:
    layout = hybrid(10, 10)
    saved = layout.needed_blocks(4, 4096, 2048) - layout.needed_blocks(4, 4096, 2048, prefix=1024)
    assert saved == 3 * 64


def test_a_last_block_is_half_full_on_average() -> None:
    average, lengths = average_waste(160, 1000, 4096, 16), range(920, 1080)
    pages = 16 * sum(blocks_for(length, 16) for length in lengths)
    assert average.paged_share == pytest.approx(1 - sum(lengths) / pages, rel=0.1)
    assert average.contiguous_share == 1 - 1000 / 4096


@given(tokens=st.integers(1, 10**6), block=st.sampled_from([1, 8, 16, 32, 256]), batched=st.integers(1, 10**5))
def test_more_tokens_never_take_fewer_blocks(tokens: int, block: int, batched: int) -> None:
    layout = kv_layout([(layer(FULL), 6), (layer(SLIDING), 18)], BF16, block=block)
    assert layout.sequence_blocks(tokens, batched) <= layout.sequence_blocks(tokens + 1, batched)
    assert (blocks_for(tokens, block) - 1) * block < tokens <= blocks_for(tokens, block) * block


@given(users=st.integers(1, 500), tokens=st.integers(1, 10**5), prefix=st.integers(0, 10**5))
def test_sharing_never_costs(users: int, tokens: int, prefix: int) -> None:
    layout = kv_layout([(layer(FULL), 6), (layer(SLIDING), 18)], BF16)
    shared = layout.needed_blocks(users, tokens, 2048, prefix)
    assert layout.sequence_blocks(tokens, 2048) <= shared <= layout.needed_blocks(users, tokens, 2048)


@given(heads=st.sampled_from([1, 2, 4, 8]), tp=st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_hold_every_head_between_them(heads: int, tp: int) -> None:
    mixer = attention(16, heads)
    assert tp * token_bytes(mixer, BF16, tp) >= token_bytes(mixer, BF16)


# Against the cache that transformers keeps


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The real one; a torchvision without its compiled operators must not keep it from loading."""
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            _KEPT[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import transformers

    return transformers


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bytes_a_token_are_those_of_a_real_cache(transformers: Any, kv_heads: int) -> None:
    import torch

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=kv_heads,
        vocab_size=64,
    )  # fmt: skip
    real = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    kept = real(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    size = sum(part.nbytes for each in kept.layers for part in (each.keys, each.values))
    assert size == 7 * 3 * token_bytes(attention(4, kv_heads, 8), BF16)

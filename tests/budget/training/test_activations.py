"""What a block keeps of a token, counted by hand."""

import pytest

from budget.decoders import gpt2, llama
from tonnage.budget.training.activations import BlockActivations, block_of
from tonnage.budget.training.configuration import Configuration
from tonnage.models import ModelShape, from_config

HIDDEN, KV, WIDTH, HEADS = 2048, 512, 8192, 32


def block(shape: ModelShape, **choices: object) -> BlockActivations:
    """The first block under these choices."""
    return block_of(shape, shape.decoder.layers[0], shape.hidden, Configuration(**choices))


def kept(shape: ModelShape, **choices: object) -> float:
    """Bytes a token on one GPU, of sequences of 1000."""
    configuration = Configuration(**choices)
    return float(block(shape, **choices).kept.per_token(configuration, 1000))


def test_llama_in_bf16() -> None:
    norm = (4 + 2) * HIDDEN  # the FP32 copy of its input and the normalised values
    reads = 2 * (2 * HIDDEN)  # the output of each norm
    attention = 2 * (HIDDEN + 2 * KV + HIDDEN) + 4 * HEADS  # queries, keys, values, output; log-sum-exp
    mlp = 2 * 4 * WIDTH  # gate, its activation, up, their product
    assert kept(llama(), precision="bf16") == 2 * norm + reads + attention + mlp


def test_llama_under_autocast_casts_for_every_matrix() -> None:
    norm = (4 + 4) * HIDDEN
    reads = 2 * (3 + 2) * HIDDEN
    attention = 2 * (HIDDEN + 2 * KV + HIDDEN) + 4 * HEADS
    assert kept(llama(), precision="bf16-mixed") == 2 * norm + reads + attention + 2 * 4 * WIDTH


def test_fp32_has_no_fused_kernel_for_grouped_queries() -> None:
    assert block(llama(), precision="fp32").kept.scores == 4 * HEADS
    assert block(llama(num_key_value_heads=32), precision="fp32").kept.scores == 0


def test_gpt2_spells_out_its_gelu_and_keeps_masks() -> None:
    hidden, width = 768, 3072
    norms_and_reads = 4 * 2 * hidden
    attention = 2 * 4 * hidden + 4 * 12 + hidden
    assert kept(gpt2(), precision="bf16") == norms_and_reads + attention + 2 * 5 * width + hidden


def test_eager_attention_keeps_scores_twice() -> None:
    flash, eager = (block(llama(), precision="bf16", attention=kernel).kept for kernel in ("flash", "eager"))
    assert flash.scores == 0
    assert eager.scores == (4 + 2) * HEADS


def test_norms_side_by_side_keep_their_input_once() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2}
    side_by_side = block(from_config({**neox, "use_parallel_residual": True}), precision="bf16")
    assert side_by_side.norms.whole == 2 * 1024


def test_query_norms_are_kept_in_fp32() -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    qwen = from_config({"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 1000, **sizes})
    plain = from_config({"model_type": "qwen2", "num_hidden_layers": 2, "vocab_size": 1000, **sizes})
    more = block(qwen, precision="bf16").attention.split - block(plain, precision="bf16").attention.split
    assert more >= (4 + 2) * (16 + 8) * 128 - 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp32"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_selective_keeps_less_than_none_and_more_than_full(precision: str, attention: str) -> None:
    configuration = Configuration(precision=precision, attention=attention)
    found = block(llama(), precision=precision, attention=attention)
    entry, selective, whole = (
        kept.per_token(configuration, 1000) for kept in (found.entry, found.selective, found.kept)
    )
    assert entry < selective < whole


@pytest.mark.parametrize("framework", ["megatron", "nanotron"])
def test_megatron_and_nanotron_recompute_scores_alone(framework: str) -> None:
    found = block(gpt2(), framework=framework, attention="eager")
    assert found.kept.scores == (2 + 2 + 1) * 12
    assert found.selective.scores == 0
    assert found.selective.split == found.kept.split


def test_selective_checkpoints_keep_what_tensor_parallelism_has_scattered() -> None:
    alone, split, unspread = (
        block(llama(), framework="fsdp2", **more).selective.whole
        for more in ({}, {"tp": 8}, {"tp": 8, "sequence_parallel": False})
    )
    assert split - alone == 2 * 2 * HIDDEN
    assert unspread == alone


def test_compiled_blocks_keep_no_value_between() -> None:
    eager, compiled = (block(llama(), framework="fsdp2", compile=way) for way in (False, True))
    assert eager.norms.whole - compiled.norms.whole == 2 * 4 * HIDDEN
    assert eager.feed_forward.split - compiled.feed_forward.split == 2 * WIDTH


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves() -> None:
    shape = llama()
    whole, split, own = (
        float(block(shape, **choices).kept.per_token(Configuration(**choices), 1))
        for choices in (
            {"tp": 8, "sequence_parallel": False},
            {"tp": 8, "sequence_parallel": True},
            {"tp": 8, "framework": "megatron"},
        )
    )
    # What matrices read is gathered from its parts, and torch keeps it so: an input for each of five matrices.
    read = 5 * 2 * HIDDEN
    assert split == pytest.approx((kept(shape) - read) / 8 + read)
    assert whole > split
    assert own == pytest.approx(kept(shape, framework="megatron") / 8)


def test_megatron_copies_what_flash_attention_2_puts_out() -> None:
    choices = {"framework": "megatron", "precision": "bf16-mixed"}
    cudnn, flash = (block(llama(), **choices, attention=kernel).attention for kernel in ("flash", "flash-2"))
    assert flash.split - cudnn.split == 2 * HIDDEN


def test_megatron_keeps_rotated_queries_and_keys_once() -> None:
    attention = block(llama(), framework="megatron", precision="bf16-mixed").attention
    assert attention.split == 2 * (HIDDEN + 2 * KV + HIDDEN) + 4 * HEADS


def test_ring_attention_copies_what_it_puts_out() -> None:
    shape = llama()
    alone, ring, own = (kept(shape, **choices) for choices in ({}, {"cp": 4}, {"cp": 4, "framework": "megatron"}))
    assert ring == alone + 2 * HIDDEN
    assert own == kept(shape, framework="megatron")


def test_adapters_wider_than_the_base_cast_what_they_read() -> None:
    wide, thin = (block(llama(), lora_rank=16, precision=precision) for precision in ("bf16-mixed", "bf16"))
    assert wide.attention.gathered == 3 * 4 * HIDDEN
    assert thin.attention.gathered == 2 * HIDDEN
    assert wide.feed_forward.split == (3 * 2 + 4) * WIDTH


def test_frozen_matrices_keep_nothing() -> None:
    found = block(llama(), lora_rank=16, lora_targets=("q_proj", "v_proj"), precision="bf16")
    assert found.feed_forward.whole == found.feed_forward.gathered == 0
    assert found.feed_forward.split == 3 * 2 * WIDTH


def test_a_mixture_copies_tokens_to_their_experts() -> None:
    from budget.training.test_sharding import mixture

    found = block(mixture(), precision="bf16").feed_forward
    assert found.split == 2 * (4 * 2 * 512 + 2 * 2 * 256)


def test_experts_that_are_frozen_keep_no_inputs() -> None:
    from budget.training.test_sharding import mixture

    frozen = block(mixture(), precision="bf16", lora_rank=8).feed_forward
    adapted = block(mixture(), precision="bf16", lora_rank=8, lora_targets=("experts",)).feed_forward
    assert frozen.split == 2 * (3 * 2 * 512 + 2 * 256)
    assert adapted.split == 2 * (4 * 2 * 512 + 2 * 2 * 256)


def test_liger_keeps_what_goes_in_and_comes_out() -> None:
    plain, liger = (block(llama(), precision="bf16", liger=liger) for liger in (False, True))
    assert (plain.norms.whole, liger.norms.whole) == (2 * (4 + 2) * HIDDEN, 2 * 2 * HIDDEN)
    assert plain.feed_forward.split - liger.feed_forward.split == 2 * WIDTH

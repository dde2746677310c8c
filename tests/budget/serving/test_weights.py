"""Weights on one rank: what is split, repeated and quantised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_shapes import LLAMA_8B, attention, latent, layer, model
from tonnage.budget.serving.weights import WEIGHT_FORMATS, stages, weight_terms
from tonnage.models import find_model
from tonnage.models.shape import ModelShape

BF16, FP8, INT4 = (WEIGHT_FORMATS[name] for name in ("bf16", "fp8", "int4"))


def size(shape: ModelShape, tp: int = 1, pp: int = 1, stage: int = 0, form: str = "bf16") -> int:
    part = stages(shape, pp)[stage]
    return sum(int(term.size_bytes) for term in weight_terms(shape, part, tp, WEIGHT_FORMATS[form]))


def test_one_gpu_holds_every_parameter_once() -> None:
    assert size(LLAMA_8B) == LLAMA_8B.parameters * 2 == 8_030_261_248 * 2


def test_fp8_leaves_embedding_and_head_alone() -> None:
    outside = 2 * 128256 * 4096
    matrices = LLAMA_8B.parameters - outside - 65 * 4096
    found = size(LLAMA_8B, form="fp8")
    assert found == matrices + matrices // 4096 * 4 + (outside + 65 * 4096) * 2
    # Logged for this model: 8.49 GiB with a rotary table of 32 MiB.
    assert (found + 2**25) / 2**30 == pytest.approx(8.49, abs=0.01)


def test_int4_has_a_scale_and_a_zero_for_each_128() -> None:
    assert INT4.matrix_bytes(1280) == 640
    assert INT4.scales_bytes(1280, 4096) == 10 * 2 + 5


def test_gguf_keeps_embedding_and_head_so_too() -> None:
    # llama.cpp states 4.58 GiB of this model.
    assert size(LLAMA_8B, form="q4_k_m") / 2**30 == pytest.approx(4.58, abs=0.01)
    assert size(LLAMA_8B, form="q8_0") / 2**30 == pytest.approx(7.95, abs=0.01)


def test_nf4_has_a_byte_for_each_64() -> None:
    form = WEIGHT_FORMATS["nf4"]
    assert form.matrix_bytes(6400) + form.scales_bytes(6400, 4096) == 3200 + 100


def test_experts_alone_in_4_bits() -> None:
    # Its files come to 594 GB.
    shape = find_model("moonshotai/Kimi-K2-Thinking")
    assert size(shape, form=shape.dtype) / 1e9 == pytest.approx(594, rel=0.01)


def test_mxfp4_keeps_all_but_experts_in_16_bits() -> None:
    shape = model([layer(attention(), 4096, 1024, experts=8)] * 2)
    experts = 2 * 8 * 3 * 4096 * 1024
    assert size(shape) - size(shape, form="mxfp4") == experts * 2 - experts // 2 - experts // 32


def test_tensor_parallelism_splits_all_but_norms() -> None:
    whole, part = size(LLAMA_8B), size(LLAMA_8B, tp=4)
    assert 4 * part == whole + 3 * 65 * 4096 * 2


def test_ranks_beyond_the_kv_heads_repeat_them() -> None:
    shape = model([layer(attention(32, 2))] * 4)
    repeated = 2 * 4096 * 256 * 4 * 2  # heads that ranks 2 to 7 hold again: six more of one head in four layers
    assert 8 * size(shape, tp=8) - size(shape) == 6 * repeated // 2 + 7 * 9 * 4096 * 2


def test_the_compressing_matrices_of_latent_attention_are_kept_whole() -> None:
    mixer = latent(16)
    shape = model([layer(mixer, 2048, 1408)] * 2, hidden=2048)
    whole = 2048 * (1536 + 512 + 64)
    assert 4 * size(shape, tp=4) - size(shape) == 3 * (2 * whole + 5 * 2048) * 2


def test_the_vocabulary_is_padded() -> None:
    shape = model([layer(attention())], vocab=1000)
    assert size(shape) == (shape.parameters + 2 * 24 * 4096) * 2


def test_left_over_layers_go_to_the_middle() -> None:
    counts = [len(stage.layers) for stage in stages(model([layer(attention())] * 10), 4)]
    assert counts == [2, 3, 3, 2]


def test_a_tied_head_is_held_at_both_ends() -> None:
    shape = model([layer(attention())] * 4, tied=True)
    assert size(shape, pp=2, stage=1) - size(shape, pp=2, stage=0) == 4096 * 2
    assert size(shape) == shape.parameters * 2


@given(layers=st.integers(1, 40), pp=st.integers(1, 40))
def test_stages_hold_the_model_between_them(layers: int, pp: int) -> None:
    shape = model([layer(attention())] * layers)
    if pp <= layers:
        assert sum(size(shape, pp=pp, stage=number) for number in range(pp)) == shape.parameters * 2


@given(tp=st.sampled_from([1, 2, 4, 8, 16]), form=st.sampled_from(sorted(WEIGHT_FORMATS)))
def test_splitting_never_costs(tp: int, form: str) -> None:
    assert size(LLAMA_8B, tp=2 * tp, form=form) < size(LLAMA_8B, tp=tp, form=form)

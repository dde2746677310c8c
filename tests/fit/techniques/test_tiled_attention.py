"""Tiled attention in models of transformers whose attention no fused kernel computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchvision_names  # noqa: F401

# isort: split
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from fit.cases import CASES, Case, assert_same_training, build_training, gradients
from fit.observed import (
    Largest,
    softmax_in_fp64,  # noqa: F401
)
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.tiled_attention import Scores, TiledAttention, make_mask, tiled_attention

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
_TEXT = {"vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, **_SMALL}


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (3, 14))
    padding = torch.ones_like(tokens)
    padding[0, 9:] = 0
    return {"input_ids": tokens, "attention_mask": padding}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["attention_mask"].bool()
    return nn.functional.cross_entropy(model(**batch).logits[kept], batch["input_ids"][kept])


def _text(model: Callable[[Any], nn.Module], config: Any) -> Callable[[], Case]:
    return lambda: (model(config), _tokens(), _loss)


def _vit() -> Case:
    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, **_SMALL)
    return ViTForImageClassification(config), *CASES["vit"]()[1:]


gemma2 = _text(Gemma2ForCausalLM, Gemma2Config(sliding_window=5, attn_logit_softcapping=1.5, **_TEXT))
gpt_oss = _text(
    GptOssForCausalLM,
    GptOssConfig(
        sliding_window=5,
        num_local_experts=2,
        num_experts_per_tok=1,
        experts_implementation="eager",  # the others know no FP64
        **_TEXT,
    ),
)
llama = _text(LlamaForCausalLM, LlamaConfig(**_TEXT))
gpt2 = _text(
    GPT2LMHeadModel,
    GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    ),
)
BUILDS = {"gemma2": gemma2, "gpt_oss": gpt_oss, "llama": llama, "gpt2": gpt2, "vit": _vit}


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_the_training_is_the_same(build: Callable[[], Case]) -> None:
    assert_same_training(build, TiledAttention(tile_rows=4), steps=5)


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_gradients_are_equal_and_undo_restores_eager(build: Callable[[], Case]) -> None:
    training = build_training(build)
    expected = gradients(training)
    undo = TiledAttention(tile_rows=4).apply(training)
    assert training.model.config._attn_implementation == "tonnage_tiled_4"
    torch.testing.assert_close(gradients(training), expected, rtol=1e-10, atol=1e-10)
    undo()
    assert training.model.config._attn_implementation == "eager"
    torch.testing.assert_close(gradients(training), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("build", [gemma2, llama])
def test_a_mask_of_the_users_own_is_heeded(build: Callable[[], Case]) -> None:
    training = build_training(build)
    counts = torch.rand(3, 1, 14, 14) < 0.6
    counts |= torch.eye(14, dtype=torch.bool)
    for mask in (counts, torch.zeros(counts.shape, dtype=torch.float64).masked_fill(~counts, -1e9)):
        own = torch.zeros(counts.shape, dtype=torch.float64).masked_fill(~counts, -1e9)
        training.loss = lambda model, batch, mask=own: _masked_loss(model, batch, mask)
        expected = gradients(training)
        undo = TiledAttention(tile_rows=4).apply(training)
        training.loss = lambda model, batch, mask=mask: _masked_loss(model, batch, mask)
        torch.testing.assert_close(gradients(training), expected, rtol=1e-10, atol=1e-10)
        undo()


def _masked_loss(model: nn.Module, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
    masks = {"full_attention": mask, "sliding_attention": mask} if isinstance(model, Gemma2ForCausalLM) else mask
    return nn.functional.cross_entropy(model(batch["input_ids"], attention_mask=masks).logits.mT, batch["input_ids"])


def test_masks_are_as_small_as_what_they_say() -> None:
    from transformers import masking_utils

    padding = torch.tensor([[True, True, False], [True, True, True]])
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 3, "attention_mask": padding}
    window = masking_utils.sliding_window_causal_mask_function(2)
    every = masking_utils.bidirectional_mask_function
    chunked = masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64))
    assert make_mask(**sizes, mask_function=masking_utils.causal_mask_function).shape == (2, 3)
    assert make_mask(**sizes, mask_function=window).shape == (2, 1, 3)
    assert make_mask(**sizes, mask_function=every).shape == (2, 1, 1, 3)
    whole = make_mask(**sizes, mask_function=chunked)
    assert torch.equal(whole, masking_utils.sdpa_mask(**sizes, mask_function=chunked, allow_is_causal_skip=False))


def test_a_dropout_of_attention_is_refused_unless_resampled() -> None:
    build = _text(LlamaForCausalLM, LlamaConfig(attention_dropout=0.1, **_TEXT))
    training = build_training(build)
    with pytest.raises(NotApplicable, match=r"rate of 0\.1"):
        TiledAttention().apply(training)
    TiledAttention(dropout="resampled", tile_rows=4).apply(training)
    losses = [gradients(training, seed=seed)[0] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def _configured(**settings: Any) -> Callable[[], Case]:
    config = LlamaConfig(**{**_TEXT, **settings})
    return _text(LlamaForCausalLM, config)


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (CASES["dropout"], {}, "No model of transformers"),
        (_configured(attn_implementation="sdpa"), {}, "No model of transformers with eager"),
        (_configured(output_attentions=True), {}, "output_attentions"),
        (llama, {"tile_rows": 0}, "at least one row"),
    ],
)
def test_what_cannot_be_is_said(build: Callable[[], Case], settings: dict[str, int], words: str) -> None:
    with pytest.raises(NotApplicable, match=words):
        TiledAttention(**settings).apply(build_training(build))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    values = query @ key.mT * scores.scaling
    if scores.soft_cap is not None:
        values = scores.soft_cap * torch.tanh(values / scores.soft_cap)
    if bias is not None:
        values = values + bias
    counts = torch.ones(values.shape, dtype=torch.bool)
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    if scores.causal:
        counts &= (keys <= rows) & (keys > rows - (scores.window or key.shape[2] + 1))
    if scores.keys is not None:
        counts &= scores.keys[:, None, None]
    if scores.mask is not None:
        counts &= scores.mask
    values = values.masked_fill(~counts, float("-inf"))
    if sinks is not None:
        values = torch.cat([values, sinks.view(1, -1, 1, 1).expand(*values.shape[:3], 1)], -1)
    return torch.softmax(values, -1)[..., : key.shape[2]].nan_to_num() @ value


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@settings(max_examples=80)
@given(
    length=st.integers(1, 20),
    groups=st.sampled_from([1, 3]),
    tile_rows=st.integers(1, 24),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
    soft_cap=st.sampled_from([None, 2.0]),
    bias_shape=st.sampled_from([None, "full", "one batch", "one row"]),
    with_sinks=st.booleans(),
    padded=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 100),
)
def test_output_and_gradients_are_those_of_attention_written_out(
    length: int,
    groups: int,
    tile_rows: int,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    bias_shape: str | None,
    with_sinks: bool,
    padded: bool,
    masked: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads = 2 * groups
    leaves: dict[str, Any] = {
        "query": _random(2, heads, length, 5),
        "key": _random(2, 2, length, 5),
        "value": _random(2, 2, length, 3),
    }
    shapes = {"full": (2, heads, length, length), "one batch": (1, heads, length, length), "one row": (2, 1, 1, length)}
    bias = None if bias_shape is None else _random(*shapes[bias_shape])
    sinks = _random(heads) if with_sinks else None
    keys = torch.rand(2, length) < 0.7 if padded else None
    if keys is not None:
        keys[:, 0] = True
    mask = torch.rand(2, 1, length, length) < 0.8 if masked else None
    if mask is not None:
        mask |= torch.eye(length, dtype=torch.bool) | (torch.arange(length) == 0)
    scores = Scores(scaling=0.4, soft_cap=soft_cap, causal=causal, window=window, keys=keys, mask=mask)
    blind = causal and window is not None and padded  # rows that see nothing have no gradient written out
    expected = _plain(*leaves.values(), scores, bias, sinks)
    found = tiled_attention(**leaves, scores=scores, tile_rows=tile_rows, bias=bias, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    trained = [leaf for leaf in (*leaves.values(), bias, sinks) if leaf is not None]
    if not blind:
        upstream = torch.randn_like(expected)
        of_expected, of_found = (torch.autograd.grad(output, trained, upstream) for output in (expected, found))
        torch.testing.assert_close(of_found, of_expected, rtol=1e-9, atol=1e-10)


def test_a_row_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    query, key, value = (_random(1, 2, 4, 3) for _ in range(3))
    keys = torch.tensor([[False, False, True, True]])
    found = tiled_attention(query, key, value, Scores(scaling=1.0, causal=True, keys=keys), tile_rows=3)
    found.sum().backward()
    assert (found[:, :, :2] == 0).all()
    assert all(leaf.grad.isfinite().all() for leaf in (query, key, value))


def test_memory_grows_with_the_length_and_not_its_square() -> None:
    largest = []
    for length in (256, 512):
        query, key, value = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        with Largest() as seen:
            tiled_attention(query, key, value, Scores(scaling=1.0, soft_cap=5.0), tile_rows=16).sum().backward()
        largest.append(seen.elements)
    assert largest == [2 * 16 * 256, 2 * 16 * 512]


def test_what_is_dropped_is_dropped_again_in_backward() -> None:
    """The output is linear in the values: its gradient there tells which weights were kept."""
    torch.manual_seed(0)
    query, key, value = (_random(1, 1, 40, 3) for _ in range(3))
    scores = Scores(scaling=0.3, dropout=0.5, seed=7)
    output = tiled_attention(query, key, value, scores, tile_rows=16)
    (gradient,) = torch.autograd.grad(output, value, torch.ones_like(output))
    torch.testing.assert_close((gradient * value).sum(), output.sum())


def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_what_was_kept() -> None:
    torch.manual_seed(0)
    query, key, value = (_random(1, 2, 12, 3) for _ in range(3))
    plain = tiled_attention(query, key, value, Scores(scaling=0.3), tile_rows=5)
    draws = [
        tiled_attention(query, key, value, Scores(scaling=0.3, dropout=0.2, seed=seed * 1000), tile_rows=5)
        for seed in range(400)
    ]
    torch.testing.assert_close(torch.stack(draws).mean(0), plain, rtol=0, atol=0.12)
    assert torch.autograd.gradcheck(
        lambda *leaves: tiled_attention(*leaves, Scores(scaling=0.3, dropout=0.2, seed=3), tile_rows=5),
        (query, key, value),
    )

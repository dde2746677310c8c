"""Fused attention: the same training, by the kernels of PyTorch, and a refusal where they would compute something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchvision_names  # noqa: F401
from fit.cases import Case, assert_same_training, build_training, gradients
from fit.observed import softmax_in_fp64  # noqa: F401

# isort: split
import timm
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.fused_attention import AttentionWeightsNotMade, FusedAttention

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (3, 10))
    padding = torch.ones_like(tokens)
    padding[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": padding}


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["attention_mask"].bool()
    return nn.functional.cross_entropy(model(**batch).logits[kept], batch["input_ids"][kept])


def llama() -> Case:
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, attn_implementation="eager", **_SMALL)
    return LlamaForCausalLM(config), _tokens(), _language_loss


def gpt2(attn_pdrop: float = 0.0) -> Case:
    config = GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=attn_pdrop,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config), _tokens(), _language_loss


def _image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["pixels"])
    return nn.functional.cross_entropy(getattr(output, "logits", output), batch["labels"])


def _images() -> dict[str, Tensor]:
    return {"pixels": torch.randn(3, 3, 32, 32, dtype=torch.float64), "labels": torch.randint(0, 10, (3,))}


def vit() -> Case:
    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, attn_implementation="eager", **_SMALL)
    return ViTForImageClassification(config), _images(), _image_loss


def timm_vit(attn_drop_rate: float = 0.0) -> Case:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=10,
        attn_drop_rate=attn_drop_rate,
    )
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model, _images(), _image_loss


class HandWritten(nn.Module):
    """Asks for attention weights, as nn.MultiheadAttention does unless told not to."""

    def __init__(self, *, reads_weights: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(32, 5)
        self.reads_weights = reads_weights

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        mixed, weights = self.attention(x, x, x, attn_mask=mask)
        return self.head(self.dropout(x + mixed)) + (weights.mean() if self.reads_weights else 0)


def hand_written(**settings: Any) -> Case:
    batch = {"x": torch.randn(3, 6, 8, dtype=torch.float64), "y": torch.randint(0, 5, (3, 6))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return HandWritten(**settings), batch, loss


def t5(dropout_rate: float = 0.0) -> Case:
    """Its encoder and decoder hold configurations of their own; a learned bias is added to the scores."""
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout_rate,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, decoder_input_ids=batch["input_ids"])
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())

    return T5ForConditionalGeneration(config), _tokens(), loss


BUILDS = [llama, gpt2, t5, vit, timm_vit, hand_written]


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("build", BUILDS)
def test_the_training_is_the_same(build: Callable[[], Case]) -> None:
    assert_same_training(build, FusedAttention())


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("build", BUILDS)
def test_gradients_are_equal_and_no_scores_are_made(build: Callable[[], Case]) -> None:
    training = build_training(build)
    _, expected = gradients(training)
    plain = _largest_softmax(training)
    undo = FusedAttention().apply(training)
    _, found = gradients(training)
    assert plain > 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert _largest_softmax(training) == 0
    undo()
    assert _largest_softmax(training) == plain


def _largest_softmax(training: Any) -> int:
    """Elements of the largest softmax over attention scores that a forward pass makes as an operator of its own."""

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            if operator is torch.ops.aten._softmax.default:
                self.largest = max(self.largest, result.numel())
            return result

    with Seen() as seen:
        training.loss(training.model, training.sample)
    return seen.largest


def test_undo_restores_what_was_set() -> None:
    training = build_training(llama)
    undo = FusedAttention().apply(training)
    assert training.model.config._attn_implementation == "sdpa"
    undo()
    assert training.model.config._attn_implementation == "eager"
    assert training.model.model.config._attn_implementation == "eager"


def test_a_backend_is_set_only_while_it_is_in_place() -> None:
    before = torch._C._get_sdp_priority_order()
    training = build_training(llama)
    training.device = torch.device("cuda")
    undo = FusedAttention(backend="efficient").apply(training)
    assert torch._C._get_sdp_priority_order()[0] == torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION.value
    undo()
    assert torch._C._get_sdp_priority_order() == before


def test_a_dropout_of_attention_is_refused_unless_resampled() -> None:
    for build in (lambda: gpt2(attn_pdrop=0.1), lambda: t5(dropout_rate=0.1), lambda: timm_vit(attn_drop_rate=0.1)):
        training = build_training(build)
        with pytest.raises(NotApplicable, match=r"rate of 0\.1"):
            FusedAttention().apply(training)
        training.model.eval()
        assert FusedAttention().why_not(training) is None
        training.model.train()
        FusedAttention(dropout="resampled").apply(training)()


def test_soft_caps_are_refused() -> None:
    config = Gemma2Config(vocab_size=96, num_key_value_heads=2, head_dim=8, attn_implementation="eager", **_SMALL)
    training = build_training(lambda: (Gemma2ForCausalLM(config), _tokens(), _language_loss))
    assert "caps its attention scores" in (FusedAttention().why_not(training) or "")


def test_asked_for_attentions_are_refused() -> None:
    training = build_training(llama)
    training.model.config.output_attentions = True
    assert "output_attentions" in (FusedAttention().why_not(training) or "")


def test_weights_that_are_read_raise_rather_than_be_wrong() -> None:
    training = build_training(lambda: hand_written(reads_weights=True))
    FusedAttention().apply(training)
    with pytest.raises(AttentionWeightsNotMade, match="mean"):
        training.loss(training.model, training.sample)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "fused already"),
        ({"backend": "fast"}, "none of default"),
        ({"backend": "cudnn"}, "this training is on cpu"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, str], words: str) -> None:
    training = build_training(llama)
    training.model.set_attn_implementation("sdpa")
    with pytest.raises(NotApplicable, match=words):
        FusedAttention(**settings).apply(training)

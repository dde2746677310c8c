"""How a transformer block is implemented: the facts that decide what autograd saves, read from `data/styles.toml`."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from tonnage.budget import table
from tonnage.budget.training.configuration import Configuration
from tonnage.models.shape import LayerShape, ModelShape

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One implementation of a block; `data/styles.toml` explains the values.

    `fused` kernels (Megatron's, or those of `torch.compile`) save only their inputs and outputs: by default the
    compiler recomputes nothing that a matrix product of the backward pass reads. `liger` has such kernels only for
    norms, rotary embeddings and gated MLPs.
    """

    norm: Literal["native", "wide", "rms", "rms-wide", "centred"]
    rotary: Literal["none", "add", "cat"]
    fused_qkv: bool = False
    activation: Literal["native", "chain", "relu"] = "native"
    dropout: bool = False
    attention_dropout: bool = False
    upcast: bool = True
    qk_norm: bool = False
    unfused_mqa: bool = False
    fused_gate: bool = False
    softcap: bool = False
    biased: bool = False
    wide_router: bool = False
    turned: bool = False
    fused: bool = False
    # How attention runs without a fused kernel: as transformers writes it ("eager"), or as PyTorch decomposes it,
    # operator by operator ("math") or in fused kernels ("apart").
    scores: Literal["", "eager", "math", "apart"] = ""
    liger: bool = False
    # Attention reads KV heads repeated to the number of query heads.
    repeated: bool = False


_FUSED = Style(norm="native", rotary="add", fused_qkv=True, fused_gate=True, fused=True, upcast=False)


def caps_logits(shape: ModelShape) -> bool:
    """Say whether the model caps its logits by a tanh, whose output is saved."""
    return bool(table("styles")["style"].get(shape.architecture, {}).get("softcap"))


def style_of(shape: ModelShape, layer: LayerShape, config: Configuration) -> Style:
    """Return the style in which the framework runs this block: transformers' eager code, or fused elsewhere."""
    written = _written(layer.written or shape.architecture, layer.rms_norm)
    written = replace(written, dropout=True) if config.dropout else written
    form = config.traits.written
    scores = _scores(layer, written, config)
    if config.compile:
        dropped = scores == "apart" and written.attention_dropout
        style = replace(_FUSED, fused_qkv=False, fused_gate=False, dropout=written.dropout, qk_norm=written.qk_norm)
        # Traced transformers models have a mask, and masked attention repeats KV heads.
        return replace(style, scores=scores, attention_dropout=dropped, repeated=config.compiled_whole)
    if form == "transformers":
        written = replace(written, scores=scores)
        return replace(written, norm="native", activation="native", liger=True) if config.liger else written
    rotary: Literal["none", "add"] = "none" if written.rotary == "none" else "add"
    style = replace(_FUSED, rotary=rotary, fused=form == "fused", scores=scores)
    return replace(style, dropout=written.dropout, attention_dropout=written.attention_dropout)


@cache
def _written(name: str, rms_norm: bool) -> Style:
    rows = table("styles")
    return Style(**(rows["style"].get(name) or rows["default"]["rms" if rms_norm else "native"]))


def _scores(layer: LayerShape, written: Style, config: Configuration) -> Literal["", "eager", "math", "apart"]:
    attention = layer.attention
    if attention is None or config.attention == "eager":
        return "eager" if config.attention == "eager" else ""
    # Compiled encoders of transformers get a full mask, for which PyTorch has no fused kernel.
    plain = config.traits.written == "transformers" and config.attention == "flash"
    if config.compile and plain and not attention.causal:
        return "apart"
    # Nor is there one for FP32 with fewer KV heads than query heads, nor for a trained bias.
    wide = config.compute_bytes == _FP32_BYTES and attention.kv_heads < attention.heads
    return "math" if wide or (plain and written.biased) else ""

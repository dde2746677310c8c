"""How a block is written: the few facts of an implementation that decide what autograd keeps. The facts are data."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tonnage.budget.configuration import Configuration
from tonnage.budget.frameworks import framework_of
from tonnage.models.shape import Layer, ModelShape

_DATA = Path(__file__).parent / "data" / "styles.toml"
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One implementation; `data/styles.toml` says what the words mean.

    `fused` kernels (Megatron's, or what `torch.compile` makes of a block) keep what goes into them and out of them, and
    no value between: by default the compiler recomputes nothing that a matrix product of the backward pass reads.
    `liger` has such kernels for norms, rotary embeddings and gated MLPs alone.
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
    # How attention goes where it is no kernel of its own but products and a softmax: as transformers writes it, or as
    # PyTorch takes it apart, in "math" one operator after the other, in "apart" by fused kernels.
    scores: Literal["", "eager", "math", "apart"] = ""
    liger: bool = False
    # Attention reads keys and values that were repeated to as many heads as queries have.
    repeated: bool = False


_FUSED = Style(norm="native", rotary="add", fused_qkv=True, fused_gate=True, fused=True, upcast=False)


def caps_logits(shape: ModelShape) -> bool:
    """The logits are kept, as the output of a tanh."""
    return bool(_rows()["style"].get(shape.architecture, {}).get("softcap"))


def style_of(shape: ModelShape, layer: Layer, configuration: Configuration) -> Style:
    """As the framework runs this block: eager PyTorch as transformers writes it, fused elsewhere."""
    written = _written(shape.architecture, layer.written, layer.rms_norm)
    written = replace(written, dropout=True) if configuration.dropout else written
    form = framework_of(configuration).written
    scores = _scores(layer, written, configuration)
    if configuration.compile:
        dropped = scores == "apart" and written.attention_dropout
        style = replace(_FUSED, fused_qkv=False, fused_gate=False, dropout=written.dropout, qk_norm=written.qk_norm)
        # What transformers traces has a mask, and its attention with a mask repeats heads of keys.
        return replace(style, scores=scores, attention_dropout=dropped, repeated=compiled_whole(configuration))
    if form == "transformers":
        written = replace(written, scores=scores)
        return replace(written, norm="native", activation="native", liger=True) if configuration.liger else written
    rotary: Literal["none", "add"] = "none" if written.rotary == "none" else "add"
    style = replace(_FUSED, rotary=rotary, fused=form == "fused", scores=scores)
    return replace(style, dropout=written.dropout, attention_dropout=written.attention_dropout)


def compiled_whole(configuration: Configuration) -> bool:
    """Whether a model of transformers is compiled with its head and loss; under FSDP2 its blocks are, one by one."""
    whole = framework_of(configuration).written == "transformers" and configuration.framework != "fsdp2"
    return configuration.compile and whole


def _scores(layer: Layer, written: Style, configuration: Configuration) -> Literal["", "eager", "math", "apart"]:
    attention = layer.attention
    if attention is None or configuration.attention == "eager":
        return "eager" if configuration.attention == "eager" else ""
    # Transformers makes a mask of all pairs for an encoder that is compiled, and PyTorch has no kernel that takes it.
    plain = framework_of(configuration).written == "transformers" and configuration.attention == "flash"
    if configuration.compile and plain and not attention.causal:
        return "apart"
    # Nor has it one for FP32 with fewer heads of keys than of queries, nor for a bias that is trained.
    wide = configuration.compute_bytes == _FP32_BYTES and attention.kv_heads < attention.heads
    return "math" if wide or (plain and written.biased) else ""


@cache
def _written(architecture: str, part: str, rms_norm: bool) -> Style:
    rows = _rows()
    known = rows["style"].get(part or architecture)
    row = known or rows["default"]["rms" if rms_norm else "native"]
    return Style(**row)


@cache
def _rows() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))

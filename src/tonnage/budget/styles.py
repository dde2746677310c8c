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
    wide_router: bool = False
    turned: bool = False
    fused: bool = False
    liger: bool = False


_FUSED = Style(norm="native", rotary="add", fused_qkv=True, fused_gate=True, fused=True, upcast=False)


def caps_logits(shape: ModelShape) -> bool:
    """The logits are kept, as the output of a tanh."""
    return bool(_rows()["style"].get(shape.architecture, {}).get("softcap"))


def style_of(shape: ModelShape, layer: Layer, configuration: Configuration) -> Style:
    """As the framework runs this block: eager PyTorch as transformers writes it, fused elsewhere."""
    written = _written(shape.architecture, layer.rms_norm)
    if configuration.compile:
        return replace(_FUSED, fused_qkv=False, fused_gate=False, dropout=written.dropout)
    form = framework_of(configuration).written
    if form == "transformers":
        return replace(written, norm="native", activation="native", liger=True) if configuration.liger else written
    rotary: Literal["none", "add"] = "none" if written.rotary == "none" else "add"
    style = replace(_FUSED, rotary=rotary, fused=form == "fused")
    return replace(style, dropout=written.dropout, attention_dropout=written.attention_dropout)


@cache
def _written(architecture: str, rms_norm: bool) -> Style:
    rows = _rows()
    row = rows["style"].get(architecture) or rows["default"]["rms" if rms_norm else "native"]
    return Style(**row)


@cache
def _rows() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))

"""The architecture of a decoder, read from config.json: weights and forward pass are built from it.

| family              | besides RMS norms, rotary positions and a gated MLP                                   |
|---------------------|---------------------------------------------------------------------------------------|
| llama               | optional biases                                                                       |
| mistral             | a sliding window                                                                      |
| qwen2               | biases of query, key and value; optional windows in the upper layers                  |
| qwen3               | norms of query and key                                                                |
| gemma               | norms around 1 + weight, scaled embeddings, tanh-GELU                                 |
| gemma2              | as gemma; norms after attention and MLP too, soft caps, a window in every other layer |
| gemma3, gemma3_text | as gemma2 without caps; norms of query and key, separate RoPE in windowed layers      |
| mixtral, qwen3_moe  | as mistral and qwen3, with experts                                                    |

Missing fields have transformers' defaults. This module knows no torch and reads no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tonnage.budget.serving.own_engine import FAMILIES
from tonnage.errors import BadModel
from tonnage.models.config import stored_format
from tonnage.models.fields import Fields, whole
from tonnage.models.files import read_json
from tonnage.models.presets import find_preset, preset_config, unknown
from tonnage.models.templates import ConfigValues
from tonnage.models.templates import architecture as known_row
from tonnage.serve.models.rope import Rope, read_rope

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer; a `window` of 0 sees every key, one of w the last w keys including its own."""

    window: int
    rope: Rope
    sparse: bool  # experts instead of the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder's structure. With `norm_offset` 1, norms multiply by 1 + weight. A soft cap of 0 is off."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int  # the longest context that the model was trained for
    layers: tuple[LayerConfig, ...]
    activation: Activation
    norm_eps: float
    norm_offset: float
    attention_scale: float
    query_bias: bool  # for query, key and value alike
    output_bias: bool
    mlp_bias: bool
    head_norms: bool  # for query and key
    sandwich_norms: bool  # also after attention and MLP
    attention_cap: float
    logit_cap: float
    embedding_scale: float
    tied: bool
    experts: int
    experts_per_token: int
    expert_intermediate: int
    normalised_experts: bool  # the chosen experts' weights sum to 1
    dtype: str  # of the checkpoint: "bf16", "fp16", "fp32"
    eos_ids: frozenset[int]


def read_architecture(path_or_preset: str | Path) -> Architecture:
    """Return the architecture of a model folder, a config.json, or a preset ("qwen3-0.6b")."""
    path = Path(path_or_preset).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        # A chat model's additional end-of-turn tokens are in its generation config.
        beside = config.with_name("generation_config.json")
        eos_ids = _ids(read_json(beside).get("eos_token_id")) if beside.is_file() else frozenset()
        return architecture_of(read_json(config), eos_ids)
    preset = find_preset(str(path_or_preset))
    if preset is not None and not path.is_dir():
        if preset.dtype not in ("fp32", "fp16", "bf16"):
            _refuse_quantized(preset.dtype)
        return architecture_of(preset_config(preset.name))
    if path.is_dir():
        raise BadModel(f"The folder {path} has no config.json.", hint="Give the folder that the model was saved to.")
    raise unknown(str(path_or_preset))


def architecture_of(config: Mapping[str, Any], eos_ids: frozenset[int] = frozenset()) -> Architecture:
    """Return the architecture that a configuration describes; `eos_ids` override its own."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise BadModel(f"The architecture {family!r} cannot be served.", hint=f"These can: {', '.join(FAMILIES)}.")
    if config.get("quantization_config"):
        _refuse_quantized(stored_format(config) or "a format that is not known")
    named = config.get("architectures") or ["ForCausalLM"]
    endings = ("ForCausalLM", "ForConditionalGeneration") if family == "gemma3" else ("ForCausalLM",)
    if not str(named[0]).endswith(endings):
        raise BadModel(f"{named[0]} is no causal language model.", hint="Give one whose class ends in ForCausalLM.")
    if family == "gemma3":
        family, config = "gemma3_text", {**config, **(config.get("text_config") or {})}
    row = known_row(family)
    assert row is not None
    made = _architecture(family, Fields(ConfigValues(config, row)), config)
    if made.heads % made.kv_heads:
        problem = f"{made.heads} query heads cannot share {made.kv_heads} key heads."
        raise BadModel(problem, hint="Give 'num_key_value_heads' a divisor of 'num_attention_heads'.")
    if made.head_dim % 2 or not made.head_dim:
        raise BadModel(f"A head is {made.head_dim} wide.", hint="Rotary positions need an even 'head_dim'.")
    if made.experts_per_token > made.experts:
        problem = f"Each token goes to {made.experts_per_token} of {made.experts} experts."
        raise BadModel(problem, hint="Give 'num_experts_per_tok' at most the number of experts.")
    if config.get("use_bidirectional_attention"):
        raise BadModel("The model's attention looks ahead.", hint="Give a causal language model.")
    return replace(made, eos_ids=eos_ids or made.eos_ids)


def _refuse_quantized(kept: str) -> None:
    problem = f"The checkpoint's weights are quantised ({kept}), which cannot be served."
    raise BadModel(problem, hint='Give the unquantised model, and weights="int8" or "fp8" to quantise it here.')


def _architecture(family: str, fields: Fields, config: Mapping[str, Any]) -> Architecture:
    gemma, later_gemma = family.startswith("gemma"), family in ("gemma2", "gemma3_text")
    sparse = family in ("mixtral", "qwen3_moe")
    heads, hidden = fields.need("heads"), fields.need("hidden")
    head_dim = fields.find("head_dim") or hidden // heads
    bias = family not in ("mistral", "mixtral", "qwen2") and fields.flag("attention_bias")
    # As stated, or as extended by YaRN.
    positions, written = fields.need("positions"), _rope_written(config)
    if written.get("rope_type", written.get("type")) == "yarn":
        rope = read_rope(written, 2, 1e4, positions)
        positions = max(positions, int(rope.factor * rope.original_positions))
    name = fields.get("hidden_activation", fields.get("hidden_act"))
    # The published Gemma says "gelu" but was trained with the tanh approximation.
    activation = "gelu_tanh" if family == "gemma" and name == "gelu" else _ACTIVATIONS.get(str(name))
    if activation is None:
        raise BadModel(f"The activation {name!r} cannot be served.", hint=f"These can: {', '.join(_ACTIVATIONS)}.")
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.find("kv_heads") or heads,
        head_dim=head_dim,
        intermediate=fields.need("intermediate"),
        vocab=fields.need("vocab"),
        positions=positions,
        layers=_layers(family, fields, config, head_dim),
        activation=activation,
        norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        norm_offset=1.0 if gemma else 0.0,
        attention_scale=(_number(fields, "query_pre_attn_scalar", head_dim) if later_gemma else head_dim) ** -0.5,
        query_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        sandwich_norms=later_gemma,
        attention_cap=_number(fields, "attn_logit_softcapping", 0.0) if family == "gemma2" else 0.0,
        logit_cap=_number(fields, "final_logit_softcapping", 0.0) if later_gemma else 0.0,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        tied=fields.flag("tie_word_embeddings"),
        experts=fields.need("experts") if sparse else 0,
        experts_per_token=fields.need("experts_per_token") if sparse else 0,
        expert_intermediate=fields.need("expert_intermediate") if sparse else 0,
        normalised_experts=family == "mixtral" or fields.flag("norm_topk_prob"),
        dtype=_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), "bf16"),
        eos_ids=_ids(config.get("eos_token_id")),
    )


def _layers(family: str, fields: Fields, config: Mapping[str, Any], head_dim: int) -> tuple[LayerConfig, ...]:
    count = fields.need("layers")
    if count > _MOST_LAYERS:
        raise BadModel(f"The model has {count:,} layers.", hint=f"At most {_MOST_LAYERS:,} make sense.")
    window, positions = fields.find("window") or 0, fields.need("positions")
    # Of full-attention layers (False) and windowed layers (True).
    written = _rope_written(config)
    theta = config.get("rope_theta") or (1e6 if family in ("mixtral", "gemma3_text") else 1e4)
    if family == "gemma3_text":
        nested = "full_attention" in written or "sliding_attention" in written
        whole_view = _mapping(written.get("full_attention")) if nested else written
        local, local_theta = _mapping(written.get("sliding_attention")), config.get("rope_local_base_freq") or 1e4
        full_rope = read_rope(whole_view, head_dim, theta, positions)
        ropes = {False: full_rope, True: read_rope(local, head_dim, local_theta, positions)}
    else:
        ropes = dict.fromkeys((False, True), read_rope(written, head_dim, theta, positions))
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise BadModel(f"'mlp_only_layers' is {dense!r}.", hint="Give a list of layers' numbers, from 0.")
    step = fields.whole("decoder_sparse_step", least=1) if family == "qwen3_moe" else 1
    sparse = family in ("mixtral", "qwen3_moe")
    return tuple(
        LayerConfig(window if slides else 0, ropes[slides], sparse and index not in dense and (index + 1) % step == 0)
        for index, slides in enumerate(_windowed(family, fields, config, count))
    )


def _windowed(family: str, fields: Fields, config: Mapping[str, Any], count: int) -> list[bool]:
    if family in ("llama", "gemma") or (family.startswith("qwen") and not fields.flag("use_sliding_window")):
        return [False] * count
    if family in ("mistral", "mixtral", "qwen3_moe"):
        return [True] * count
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != count:
            raise BadModel(f"'layer_types' lists {len(kinds)} layers of {count}.", hint="Give one kind for each layer.")
        return [kind == "sliding_attention" for kind in kinds]
    if family.startswith("qwen"):
        return [index >= fields.whole("max_window_layers") for index in range(count)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    period = 2 if family == "gemma2" else whole(pattern, "sliding_window_pattern", least=1)
    return [(index + 1) % period != 0 for index in range(count)]


def _rope_written(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(config.get("rope_parameters")) or _mapping(config.get("rope_scaling"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise BadModel(f"{name!r} is {value!r}.", hint=f"Give {name!r} a number of 0 or more.")
    return float(value)


def _ids(value: object) -> frozenset[int]:
    listed = value if isinstance(value, list) else [value]
    return frozenset(item for item in listed if type(item) is int)

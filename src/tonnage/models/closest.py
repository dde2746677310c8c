"""The known architecture most similar to an unknown one, judged by its fields.

| it has                                | it is treated as   |
|---------------------------------------|--------------------|
| a compressed key and value (MLA)      | deepseek_v3        |
| experts                               | mixtral            |
| RMS norms or rotary positions         | llama              |
| anything else                         | gpt2               |
"""

from collections.abc import Mapping
from typing import Any

from tonnage.errors import BadModel
from tonnage.models.fields import Fields

_LLAMA = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
    "vocab_size": "vocab",
    "max_position_embeddings": "positions",
}
_GPT2 = {"n_embd": "hidden", "n_layer": "layers", "n_head": "heads", "n_inner": "intermediate", "vocab_size": "vocab",
         "n_positions": "positions"}  # fmt: skip
_NEEDED = ("hidden", "layers", "heads", "vocab")


def closest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the known architecture with the unknown one's numbers."""
    fields = Fields(config.get)
    missing = [meant for meant in _NEEDED if fields.find(meant) is None]
    if missing:
        raise BadModel(
            f"The configuration's architecture {config.get('model_type')!r} is not known, and it does not say: "
            f"{', '.join(missing)}.",
            hint="Give a configuration with model_type, hidden_size, num_hidden_layers, num_attention_heads, vocab_size.",
        )
    if fields.get("kv_lora_rank") is not None:
        return {**config, "model_type": "deepseek_v3", "architectures": None}
    if fields.find("experts"):
        experts = {"num_local_experts": fields.need("experts"), "num_experts_per_tok": fields.find("experts_per_token")}
        width = {"intermediate_size": fields.find("expert_intermediate")}
        return _like("mixtral", {**_LLAMA}, fields) | experts | width
    modern = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "num_key_value_heads")
    if any(fields.get(name) is not None for name in modern):
        return _like("llama", _LLAMA, fields) | {"attention_bias": fields.flag("attention_bias")}
    return _like("gpt2", _GPT2, fields)


def _like(model_type: str, names: Mapping[str, str], fields: Fields) -> dict[str, Any]:
    numbers = {name: fields.find(meant) for name, meant in names.items()}
    tied = fields.get("tie_word_embeddings")
    stated = {name: number for name, number in numbers.items() if number is not None}
    return {"model_type": model_type, **stated, **({} if tied is None else {"tie_word_embeddings": tied})}

"""Forms that published configurations take and saved ones do not, made alike.

| published                                               | saved                                 |
|---------------------------------------------------------|---------------------------------------|
| the text model's fields beside those of the vision part | in a `text_config`                    |
| a part of the whole's own type                          | a part of its usual type              |
| `hybrid_override_pattern`, a letter for each layer      | `layers_block_type`, a word for each  |
"""

from collections.abc import Mapping
from typing import Any

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def as_saved(config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as transformers would write it."""
    made = dict(config)
    defaults = row["defaults"]
    usual = defaults.get("text_config")
    if isinstance(usual, Mapping) and "text_config" not in config and "hidden_size" in config:
        made["text_config"] = {name: value for name, value in config.items() if name in usual and name != "model_type"}
    for part in defaults:
        given = made.get(part)
        if isinstance(given, Mapping) and given.get("model_type") == row["model_type"]:
            made[part] = {name: value for name, value in given.items() if name != "model_type"}
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and config.get("layers_block_type") is None:
        made["layers_block_type"] = [_LETTERS.get(letter, letter) for letter in pattern]
    return made

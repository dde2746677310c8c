"""What a hub name says beside the model: the weights' format, and words that change no shape (`data/names.toml`).

| asked                                            | model                    | weights |
|--------------------------------------------------|--------------------------|---------|
| "Qwen/Qwen2.5-7B-Instruct-AWQ"                   | qwen2.5-7b               | int4    |
| "someone/Llama-3.1-8B-Instruct-FP8-dynamic"      | llama-3.1-8b             | fp8     |
| "unsloth/Qwen3-8B-GGUF:Q8_0"                     | qwen3-8b                 | q8_0    |
| "mistral-7b-instruct-v0.2.Q4_K_M.gguf"           | mistral-7b-instruct-v0.2 | q4_k_m  |

It does not know which models exist: `models.presets` tries one form of the name after another.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data" / "names.toml"
# "owner/", or "owner/repository/" before a file.
_OWNER = re.compile(r"([\w-][\w.-]*)/(?:[\w.-]+/(?=[^/]+\.gguf$))?(?=[^/]+$)")
_GGUF = re.compile(r"(?<![a-z0-9])(i?q\d_(?:k_[sml]|k|0|1|xxs|xs|s|m|nl))(?![a-z0-9])")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_BETWEEN_WORDS = re.compile(r"[-_\s:]+|\.(?!\d)|(?<!\d)\.")


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name without its owner. `weights` is empty if the name does not give their format."""

    words: tuple[str, ...]
    weights: str
    note: str

    def forms(self) -> Iterator[str]:
        """Yield possible model names: the whole, then each time without one more word that changes no shape."""
        words, variants = list(self.words), _table()["variants"]
        yield "-".join(words)
        for index in range(len(words) - 1, 0, -1):
            if words[index] in variants:
                del words[index]
                yield "-".join(words)


def read_name(name: str) -> HubName:
    """Return the words of the model, and its weights' format."""
    text = name.lower().strip()
    owner = _OWNER.match(text)
    text = _SHARD.sub("", text[owner.end() if owner else 0 :].removesuffix(".gguf"))
    quantized = _GGUF.findall(text)
    words = [word for word in _BETWEEN_WORDS.split(_GGUF.sub("", text)) if word]
    said = {*words, _table()["owners"].get(owner[1] if owner else "", "")}
    rule = next((rule for rule in _table()["formats"] if said.issuperset(rule["words"])), None)
    spent = {word for rule in _table()["formats"] for word in rule["words"]} | {"mlx", "bnb"}
    kept = tuple(word for index, word in enumerate(words) if index == 0 or word not in spent)
    if quantized:
        return HubName(kept, quantized[-1], "")
    return HubName(kept, rule["format"] if rule else "", rule.get("note", "") if rule else "")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text())

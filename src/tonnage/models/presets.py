"""Well-known models: their published configurations are data (`data/presets.json`). Nothing is downloaded.

| asked                                                     | found            |
|-----------------------------------------------------------|------------------|
| "llama-3.1-70b", "llama3.1-70B", "Llama 3.1 70B"          | llama-3.1-70b    |
| "meta-llama/Llama-3.1-8B-Instruct"                        | llama-3.1-8b     |
| "gpt2-medium", "openai-community/gpt2-medium"             | gpt2-medium      |

A hub name says more than the model: the weights' format, and words that change no shape (`data/names.toml`). One form of
the name after another is tried.

| asked                                            | model                    | weights |
|--------------------------------------------------|--------------------------|---------|
| "Qwen/Qwen2.5-7B-Instruct-AWQ"                   | qwen2.5-7b               | int4    |
| "someone/Llama-3.1-8B-Instruct-FP8-dynamic"      | llama-3.1-8b             | fp8     |
| "unsloth/Qwen3-8B-GGUF:Q8_0"                     | qwen3-8b                 | q8_0    |
| "mistral-7b-instruct-v0.2.Q4_K_M.gguf"           | mistral-7b-instruct-v0.2 | q4_k_m  |
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.errors import UnknownModel
from tonnage.models.config import from_config
from tonnage.models.shape import ModelShape

_DATA = Path(__file__).parent / "data"
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
        words, variants = list(self.words), _words()["variants"]
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
    said = {*words, _words()["owners"].get(owner[1] if owner else "", "")}
    rule = next((rule for rule in _words()["formats"] if said.issuperset(rule["words"])), None)
    spent = {word for rule in _words()["formats"] for word in rule["words"]} | {"mlx", "bnb"}
    kept = tuple(word for index, word in enumerate(words) if index == 0 or word not in spent)
    if quantized:
        return HubName(kept, quantized[-1], "")
    return HubName(kept, rule["format"] if rule else "", rule.get("note", "") if rule else "")


@cache
def _words() -> dict[str, Any]:
    return tomllib.loads((_DATA / "names.toml").read_text())


def all_presets() -> tuple[str, ...]:
    """Return every preset's name, in the order of the file."""
    return tuple(_presets())


def find_preset(name: str) -> ModelShape | None:
    """Return the preset of that name or hub id, with the weights' format in the name; None if unknown."""
    key, said = _read(name)
    if key is None:
        return None
    shape = _shape(key)
    notes = (*shape.notes, said.note) if said.note else shape.notes
    return replace(shape, dtype=said.weights, notes=notes) if said.weights else shape


def hub_id(name: str) -> str:
    """Return the preset's hub id; the name itself if it has none or is of another checkpoint."""
    key, said = _read(name)
    if key is None or said.weights or "/" in name:
        return name
    return next((each for each in _presets()[key]["names"] if "/" in each), name)


def unknown(name: str, *, hint: str = "") -> UnknownModel:
    """Return the error for an unknown name, with the closest presets and a hint."""
    from difflib import get_close_matches

    # The preset with the longest name that consists of neighbouring words of this one.
    words = read_name(name).words
    runs = ((start, end) for start in range(len(words)) for end in range(start + 2, len(words) + 1))
    longest = sorted(runs, key=lambda run: run[0] - run[1])
    named = (_by_name().get(_plain("-".join(words[start:end]))) for start, end in longest)
    within = next((key for key in named if key is not None), "")
    if within:
        known = f"If it is a fine-tune of {within} and of its shape, plan {within}."
    else:
        close = [_by_name()[match] for match in get_close_matches(_plain(name), _by_name(), n=8, cutoff=0.5)]
        offered = ", ".join(list(dict.fromkeys(close))[:4])
        known = f"Did you mean one of: {offered}?"
        known = known if offered else "Give a preset, a config.json, a folder or a checkpoint."
    return UnknownModel(f"There is no preset, file or folder called {name!r}.", hint=f"{hint}\n{known}".lstrip())


def preset_config(key: str) -> Mapping[str, Any]:
    """Return the published configuration."""
    row = _presets()[key]
    base = preset_config(row["like"]) if "like" in row else {}
    return {**base, **row.get("config", {})}


@cache
def _shape(key: str) -> ModelShape:
    return from_config(preset_config(key), key)


@cache
def _presets() -> Mapping[str, Any]:
    return dict(json.loads((_DATA / "presets.json").read_bytes()))


@cache
def _by_name() -> Mapping[str, str]:
    names: dict[str, str] = {}
    for key, row in _presets().items():
        for name in (key, *row["names"]):
            # Converters write the owner into their own name: Qwen_Qwen3-8B-GGUF.
            for plain in (_plain(name), _plain(name.rpartition("/")[2]), _plain(name.replace("/", "_"))):
                names.setdefault(plain, key)
    return names


def _read(name: str) -> tuple[str | None, HubName]:
    """Return the key of the preset that a name means, and what else the name says."""
    names, said = _by_name(), read_name(name)
    whole = names.get(_plain(name))
    if whole is not None:
        return whole, HubName((), "", "")
    return next((names[form] for form in map(_plain, said.forms()) if form in names), None), said


def _plain(name: str) -> str:
    """Normalize spelling; a point between digits stays, as 1.3b is not 13b."""
    return re.sub(r"[^a-z0-9/.]|\.(?!\d)|(?<!\d)\.", "", name.lower())

"""Well-known models: their published configurations are data (`data/presets.json`). Nothing is downloaded.

| asked                                                     | found            |
|-----------------------------------------------------------|------------------|
| "llama-3.1-70b", "llama3.1-70B", "Llama 3.1 70B"          | llama-3.1-70b    |
| "meta-llama/Llama-3.1-8B-Instruct"                        | llama-3.1-8b     |
| "gpt2-medium", "openai-community/gpt2-medium"             | gpt2-medium      |

If a name gives its weights' format ("someone/Llama-3.1-8B-Instruct-FP8"), the shape has it (`models.names`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.errors import UnknownModel
from tonnage.models.config import from_config
from tonnage.models.names import HubName, read_name
from tonnage.models.shape import ModelShape

_DATA = Path(__file__).parent / "data" / "presets.json"


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

    within = _named_within(name)
    if within:
        known = f"If it is a fine-tune of {within} and of its shape, plan {within}."
        return UnknownModel(f"There is no preset, file or folder called {name!r}.", hint=f"{hint}\n{known}".lstrip())
    close = [_by_name()[match] for match in get_close_matches(_plain(name), _by_name(), n=8, cutoff=0.5)]
    offered = ", ".join(list(dict.fromkeys(close))[:4])
    known = f"Did you mean one of: {offered}?" if offered else "Give a preset, a config.json, a folder or a checkpoint."
    problem = f"There is no preset, file or folder called {name!r}."
    return UnknownModel(problem, hint=f"{hint}\n{known}".lstrip())


def _named_within(name: str) -> str:
    """Return the preset with the longest name that consists of neighbouring words of this one; "" if none."""
    words = read_name(name).words
    runs = ((start, end) for start in range(len(words)) for end in range(start + 2, len(words) + 1))
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        key = _by_name().get(_plain("-".join(words[start:end])))
        if key is not None:
            return key
    return ""


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
    presets: dict[str, Any] = json.loads(_DATA.read_bytes())
    return presets


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

"""What a tensor is for, by its name in transformers: attention, MLP, norm, embedding or head (`data/roles.toml`)."""

import re
import tomllib
from pathlib import Path
from typing import Any

_FORMS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "data" / "roles.toml").read_text("utf-8"))
_TOWERS = {tower: re.compile(form) for tower, form in _FORMS.pop("towers").items()}
_ROLES = {role: re.compile(form) for role, form in _FORMS.items()}
is_attention, is_recurrent, is_cross = (_ROLES[role].search for role in ("attention", "recurrent", "cross"))
is_gate, is_extra_token, is_head = (_ROLES[role].search for role in ("gate", "extra_token", "head"))


def part(name: str) -> str:
    """Return the part that a tensor or module list belongs to: projector, vision, audio, encoder, else language."""
    if _ROLES["projector"].search(name):
        return "projector"
    return next((tower for tower, form in _TOWERS.items() if form.search(name) and "text" not in name), "language")


def is_norm(name: str, dimensions: int) -> bool:
    """Say whether it is a norm of the layer; those of queries and keys belong to attention."""
    return dimensions <= 1 and bool(_ROLES["norm"].search(name)) and not _ROLES["inner_norm"].search(name)


def is_routed_expert(name: str) -> bool:
    """Say whether it belongs to routed experts."""
    return bool(_ROLES["experts"].search(name)) and not _ROLES["shared"].search(name)


def is_embedding(name: str) -> bool:
    """Say whether it embeds tokens, positions or patches."""
    return bool(_ROLES["embedding"].search(name)) and not is_head(name)

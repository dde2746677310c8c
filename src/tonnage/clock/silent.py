"""Operators that launch no kernel of their own: views, and those that only call others."""

import tomllib
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "silent.toml"


@cache
def _groups() -> dict[str, frozenset[str]]:
    return {group: frozenset(names.split()) for group, names in tomllib.loads(_DATA.read_text("utf-8")).items()}


@cache
def shapeless() -> frozenset[str]:
    """Return operators whose shapes do not matter: views, and casts, whose copy has the shapes."""
    return _groups()["views"] | _groups()["casts"]


@cache
def silent() -> frozenset[str]:
    """Return all of them."""
    return frozenset().union(*_groups().values())

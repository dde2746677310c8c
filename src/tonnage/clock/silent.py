"""Operators that launch no kernel of their own: other looks at the same memory, and those that only call others."""

import tomllib
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "silent.toml"


@cache
def _groups() -> dict[str, frozenset[str]]:
    return {group: frozenset(names.split()) for group, names in tomllib.loads(_DATA.read_text("utf-8")).items()}


@cache
def shapeless() -> frozenset[str]:
    """Operators of which it does not matter with what shapes they are called: views, and casts, whose copy has the shapes."""
    return _groups()["views"] | _groups()["casts"]


@cache
def silent() -> frozenset[str]:
    """All of them."""
    return frozenset().union(*_groups().values())

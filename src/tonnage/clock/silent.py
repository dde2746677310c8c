"""Operators that launch no kernel of their own: other looks at the same memory, and those that only call others."""

import tomllib
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "silent.toml"


@cache
def _groups() -> dict[str, frozenset[str]]:
    return {group: frozenset(names.split()) for group, names in tomllib.loads(_DATA.read_text("utf-8")).items()}


def views() -> frozenset[str]:
    """Operators that leave memory as it is, or nothing in it."""
    return _groups()["views"]


@cache
def silent() -> frozenset[str]:
    """All of them."""
    return frozenset().union(*_groups().values())

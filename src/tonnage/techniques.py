"""The table of techniques that save memory (`techniques.toml`), behind `explain`, `plan` and `fit`. Needs no torch."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def techniques() -> dict[str, dict[str, Any]]:
    """Return all techniques by name; the head of the file says what each key means."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def change_of(name: str, **values: object) -> tuple[str, str]:
    """Return what a technique changes, in words, and what it costs; `values` fill in the words."""
    row = techniques()[name]
    return row["change"].format(**values), row["costs"]


def asked_by_flag(name: str, **values: object) -> tuple[str, str, dict[str, Any]]:
    """Return what a technique changes, the flag of `plan train` for it, and the fields of the request that it sets."""
    row = techniques()[name]
    return row["change"], row["flag"].format(**values), row.get("request", {})

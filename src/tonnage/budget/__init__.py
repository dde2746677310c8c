"""Formulas for memory and time over a model's shape, a configuration and a GPU, without torch."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@cache
def table(name: str) -> dict[str, Any]:
    """Return a data file of this package, read once."""
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))

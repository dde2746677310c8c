"""Formulas for memory and time over a model's shape, a configuration and a GPU, without torch."""

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@cache
def table(name: str) -> dict[str, Any]:
    """Return a data file of this package, read once."""
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number above `low` and up to `high` that holds, by bisection; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low

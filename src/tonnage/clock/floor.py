"""The minimum time of a kernel, in a module of its own so that it does not import NumPy."""

import tomllib
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "memory.toml"


@cache
def kernel_floor_s() -> float:
    """Return the seconds of an empty kernel, including the gap to the next one."""
    common = tomllib.loads(_DATA.read_text("utf-8"))["common"]
    return float(common["kernel_s"] + common["gap_s"])

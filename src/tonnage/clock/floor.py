"""The least that any kernel takes. It stands apart from the kernels, which come with numpy."""

import tomllib
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "memory.toml"


@cache
def kernel_floor_s() -> float:
    """Of an empty kernel, the gap to the next one included."""
    common = tomllib.loads(_DATA.read_text("utf-8"))["common"]
    return float(common["kernel_s"] + common["gap_s"])

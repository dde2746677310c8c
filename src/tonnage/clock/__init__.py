"""How long kernels take on a GPU: launches in, seconds out. It does not import torch."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def facts(name: str) -> dict[str, Any]:
    """Return a data file of the clock: fitted figures, or operators by family."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text("utf-8"))

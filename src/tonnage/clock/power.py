"""What a card's power limit costs: where a step would draw more than it allows, the card lowers its clock.

A step is short against the time over which a card averages its power, so one figure holds for all of it: arithmetic slows down,
what is bound by memory does not.
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "power.toml"


@cache
def _figures() -> dict[str, float]:
    return tomllib.loads(_DATA.read_text("utf-8"))


def slowdown(kernels: Iterable[tuple[float, float]], step_s: float) -> float:
    """The factor on the time of arithmetic. Each kernel has its seconds and the share of the peak rate that it reaches."""
    figures = _figures()
    busy_s = drawn = 0.0
    for seconds, share in kernels:
        busy_s += seconds
        drawn += seconds * (figures["busy"] + figures["arithmetic"] * min(1.0, share))
    whole_s = max(step_s, busy_s)
    if not whole_s:
        return 1.0
    mean = (drawn + (whole_s - busy_s) * figures["idle"]) / whole_s
    return float(max(1.0, mean) ** (1 / figures["exponent"]))

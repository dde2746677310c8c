"""How far a predicted peak may be off: factors by what is trained and how, learnt from published runs. They are data."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from tonnage.budget.configuration import Configuration

_DATA = Path(__file__).parent / "data" / "ranges.toml"
Kind = Literal["whole", "split", "adapters"]


def kind_of(configuration: Configuration) -> Kind:
    """Of one configuration, in plain numbers."""
    if configuration.lora_rank:
        return "adapters"
    return "split" if max(configuration.tp, configuration.pp, configuration.cp) > 1 else "whole"


def peak_factors(configuration: Configuration) -> tuple[float, float]:
    """Of the low end and of the high end: nine of ten runs are between."""
    low, high = _figures()[kind_of(configuration)]["peak"]
    return low, high


@cache
def _figures() -> dict[str, dict[str, list[float]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))

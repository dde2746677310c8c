"""The error range of a predicted peak, by kind of training: factors learned from published runs, stored as data."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from tonnage.budget.configuration import Configuration

_DATA = Path(__file__).parent / "data" / "ranges.toml"
Kind = Literal["whole", "split", "adapters"]


def kind_of(configuration: Configuration) -> Kind:
    """Return the kind of one configuration with plain numbers."""
    if configuration.lora_rank:
        return "adapters"
    return "split" if max(configuration.tp, configuration.pp, configuration.cp) > 1 else "whole"


def peak_factors(configuration: Configuration) -> tuple[float, float]:
    """Return the low and high factors between which nine of ten runs lie."""
    low, high = _figures()[kind_of(configuration)]["peak"]
    return low, high


@cache
def _figures() -> dict[str, dict[str, list[float]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))

"""How far a predicted time may be off: factors on what card and host take, for the fast end of a range and for the slow one."""

import tomllib
from functools import cache
from pathlib import Path

from tonnage.hardware import Gpu

_DATA = Path(__file__).parent / "data" / "ranges.toml"


@cache
def _figures() -> dict[str, dict[str, list[float]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))


def factors(gpu: Gpu) -> tuple[tuple[float, float], tuple[float, float]]:
    """(card, host) of the low end and of the high end."""
    figures = _figures()
    card, host = figures.get(gpu.key, figures["other"])["card"], figures["host"]["host"]
    return (card[0], host[0]), (card[1], host[1])


def comparison_error() -> float:
    """Of the ratio between the times of two plans for one model on the same cards, whose own factor both share."""
    (error,) = _figures()["plans"]["error"]
    return error

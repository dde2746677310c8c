"""The error range of a predicted time: factors on GPU and host time, for the fast and the slow end."""

import tomllib
from functools import cache
from pathlib import Path

from tonnage.hardware import Gpu

_DATA = Path(__file__).parent / "data" / "ranges.toml"


@cache
def _figures() -> dict[str, dict[str, list[float]]]:
    return tomllib.loads(_DATA.read_text("utf-8"))


def factors(gpu: Gpu) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (GPU, host) factors of the low and of the high end."""
    figures = _figures()
    card, host = figures.get(gpu.key, figures["other"])["card"], figures["host"]["host"]
    return (card[0], host[0]), (card[1], host[1])


def comparison_error() -> float:
    """Return the error of the ratio of two plans' times for one model on the same GPUs, which share a factor."""
    (error,) = _figures()["plans"]["error"]
    return error

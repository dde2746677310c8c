"""The error range of a predicted time: factors on GPU and host time, for the fast and the slow end."""

from tonnage.clock import facts
from tonnage.hardware import Gpu


def factors(gpu: Gpu) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (GPU, host) factors of the low and of the high end."""
    figures = facts("ranges")
    card, host = figures.get(gpu.key, figures["other"])["card"], figures["host"]["host"]
    return (card[0], host[0]), (card[1], host[1])


def comparison_error() -> float:
    """Return the error of the ratio of two plans' times for one model on the same GPUs, which share a factor."""
    return float(facts("ranges")["plans"]["error"][0])

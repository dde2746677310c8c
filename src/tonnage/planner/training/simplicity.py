"""Compare the simplicity of plans, and pick the simplest among those the clock cannot tell apart.

The clock compares plans of one model on the same GPUs with an error (`clock.ranges.comparison_error`): a smaller gain
may as well be a loss. Within the error, the plan that is easier to run is the better answer.
"""

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from tonnage.budget.training.configuration import Configuration, Number
from tonnage.clock.ranges import comparison_error, factors
from tonnage.hardware.cluster import Cluster

if TYPE_CHECKING:
    from tonnage.planner.training.search import Judged


def burdens(plan: Configuration, cluster: Cluster) -> dict[str, Number]:
    """Return what makes a plan less simple, the most important first; later ones only break ties."""
    tp, _, cp, ep = degrees = [np.asarray(degree) for degree in (plan.tp, plan.pp, plan.cp, plan.ep)]
    # Tensor-parallel ranks are innermost, then context; experts span both.
    spans = (tp, tp * cp * (cp > 1), ep)
    hybrid = ((np.asarray(plan.shard) < plan.data) & (plan.zero > 0)).astype(int)
    return {
        "kinds of parallelism beside data parallelism": sum(degree > 1 for degree in degrees),
        "those of them that cross hosts, but for a pipeline": sum(
            (span > cluster.gpus_per_host).astype(int) for span in spans
        ),
        "offload": int(plan.offloads),
        "recomputation": int(plan.checkpoint != "none"),
        "a library beside PyTorch": int(plan.framework not in ("torch", "fsdp2")),
        "ZeRO, hybrid sharding, a chunked loss": int(plan.zero > 0) + int(plan.loss == "chunked") + hybrid,
    }


def burden(plan: Configuration, cluster: Cluster) -> Number:
    """Return one number per plan: the lower, the simpler. No single burden counts to ten."""
    return reduce(lambda whole, count: 10 * whole + count, burdens(plan, cluster).values())


def fastest(judged: Iterable["Judged"]) -> tuple["Judged", int]:
    """Return the fastest that fits; among equals, the one that needs least memory."""
    found: list[tuple[float, float, int, Judged, int]] = []
    for one in judged:
        if one.fits.any():
            speed = np.where(one.fits, one.tokens_per_s, 0.0)
            quickest = np.flatnonzero(speed == speed.max())
            index = int(quickest[one.total_bytes[quickest].argmin()])
            found.append((-float(speed[index]), float(one.total_bytes[index]), len(found), one, index))
    *_, one, index = min(found)
    return one, index


def comparable(judged: Iterable["Judged"], cluster: Cluster) -> list["Judged"]:
    """Return those whose speeds the clock can compare: all that fit, or only those that offload nothing.

    An offloaded plan depends on the host and its link, whose error is independent of the GPU's, so it must gain more
    than the GPU's range.
    """
    judged = [one for one in judged if one.fits.any()]
    stay = [one for one in judged if not one.family.configuration.offloads]
    _, (card, _) = factors(cluster.gpu)
    return stay if stay and _speed(fastest(judged)) <= card * _speed(fastest(stay)) else judged


def simplest(judged: Iterable["Judged"], cluster: Cluster) -> tuple["Judged", int]:
    """Return the simplest plan within the clock's error of the fastest; among equals, the fastest."""
    judged = comparable(judged, cluster)
    least_speed = _speed(fastest(judged)) / (1 + comparison_error())
    found: list[tuple[int, float, float, int, Judged, int]] = []
    for one in judged:
        near = np.flatnonzero(one.fits & (one.tokens_per_s >= least_speed))
        if near.size:
            counts = np.broadcast_to(burden(one.family.configuration, cluster), one.fits.shape)[near]
            first = np.lexsort((one.total_bytes[near], -one.tokens_per_s[near], counts))[0]
            index = int(near[first])
            key = int(counts[first]), -float(one.tokens_per_s[index]), float(one.total_bytes[index]), len(found)
            found.append((*key, one, index))
    *_, one, index = min(found)
    return one, index


def _speed(item: tuple["Judged", int]) -> float:
    one, index = item
    return float(one.tokens_per_s[index])

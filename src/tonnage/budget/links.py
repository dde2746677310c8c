"""The seconds of one collective of a captured step, from the planner's model of links."""

from collections.abc import Callable

from tonnage.budget.collectives import ClusterLinks
from tonnage.budget.roofline import calibration
from tonnage.hardware.cluster import Cluster

_REDUCTIONS = ("all_reduce", "barrier")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_MESSAGES = ("send", "recv")


def collective_seconds(cluster: Cluster) -> Callable[[str, int, int, int], float]:
    """Return a function of operation, total bytes, ranks and stride that gives the seconds of a collective."""
    network = ClusterLinks(cluster, calibration())

    def seconds(operation: str, size_bytes: int, ranks: int, apart: int) -> float:
        if operation in _MESSAGES:
            found = network.send_s(size_bytes, apart + 1)
        elif operation in _EXCHANGES:
            found = network.exchange_s(size_bytes, ranks)
        elif operation in _REDUCTIONS:
            found = network.reduce_s(size_bytes, ranks, apart)
        else:  # gathers and scatters; a broadcast goes around the ring as a gather does
            found = network.gather_s(size_bytes, ranks, apart)
        return float(found)

    return seconds

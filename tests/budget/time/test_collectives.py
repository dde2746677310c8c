"""One collective in seconds: by the planner's own arithmetic."""

import pytest

from tonnage.budget.time.collectives import ClusterLinks, collective_seconds
from tonnage.budget.time.roofline import calibration
from tonnage.hardware.cluster import find_cluster

CLUSTER = find_cluster("2x8xh200")
SECONDS, NETWORK = collective_seconds(CLUSTER), ClusterLinks(CLUSTER, calibration())
SIZE = 1 << 28


def test_collectives_take_what_the_planner_says() -> None:
    assert SECONDS("all_reduce", SIZE, 8, 1) == pytest.approx(float(NETWORK.reduce_s(SIZE, 8, 1)))
    assert SECONDS("all_gather_into_tensor", SIZE, 16, 1) == pytest.approx(float(NETWORK.gather_s(SIZE, 16, 1)))
    assert SECONDS("all_to_all_single", SIZE, 8, 1) == pytest.approx(float(NETWORK.exchange_s(SIZE, 8)))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter_tensor", "all_to_all", "broadcast", "send"])
def test_beyond_a_host_everything_takes_longer(operation: str) -> None:
    near = SECONDS(operation, SIZE, 2, 1)
    far = SECONDS(operation, SIZE, 2, 8) if operation != "all_to_all" else SECONDS(operation, SIZE, 16, 1)
    assert 0 < near < far

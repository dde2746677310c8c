"""What a training needs of the GPUs, their hosts and drives, and of both while its model is loaded.

The search, what is offered, what would fit and the plan itself ask this, so that none of them says otherwise.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.demands import Demand, Part
from tonnage.budget.loading import loading_sizes
from tonnage.budget.training.configuration import Configuration, Quantity
from tonnage.budget.training.memory import needed_bytes
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape


def demands_of(shape: ModelShape, config: Configuration, cluster: Cluster) -> tuple[Demand, ...]:
    """Return the demands of one configuration, or of each of many."""
    needed = needed_bytes(shape, config, cluster.gpu)
    loading = loading_sizes(shape, config, cluster).demands(cluster)
    return (*step_demands(*needed, cluster), *loading)


def step_demands(
    total_bytes: Quantity, host_bytes: Quantity, drive_bytes: Quantity, cluster: Cluster
) -> tuple[Demand, ...]:
    """Return the demands of a training step from the bytes of one rank: on its GPU, on the host and on drives."""
    memory, gpus = cluster.gpu.memory_bytes, cluster.gpus_per_host
    drives = Demand(part="drives", needed_bytes=gpus * drive_bytes, available_bytes=cluster.nvme_bytes, gpus=gpus)
    known_drives = (drives,) if cluster.nvme_bytes else ()
    if not cluster.host_memory_bytes:
        both = total_bytes + host_bytes
        part: Part = "shared memory" if np.any(np.asarray(host_bytes) > 0) else "GPU"
        return (Demand(part=part, needed_bytes=both, available_bytes=memory), *known_drives)
    host_capacity = cluster.host_memory_bytes
    return (
        Demand(part="GPU", needed_bytes=total_bytes, available_bytes=memory),
        Demand(part="host", needed_bytes=gpus * host_bytes, available_bytes=host_capacity, gpus=gpus),
        *known_drives,
    )


def are_met(demands: Iterable[Demand], size: int) -> NDArray[np.bool_]:
    """Say of each of `size` configurations whether all of these demands are met."""
    met = np.ones(size, dtype=bool)
    for demand in demands:
        met &= demand.is_met
    return met

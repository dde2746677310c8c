"""The virtual cluster: runs an unmodified torchrun script on virtual GPUs, with one process for each distinct rank."""

from tonnage.virtual.cluster.cluster import recorded, run_cluster
from tonnage.virtual.cluster.rank import RankRun

__all__ = ["RankRun", "recorded", "run_cluster"]

"""The virtual cluster: an unmodified torchrun script on GPUs that are not there, one process for each distinct rank."""

from tonnage.virtual.cluster.cluster import ClusterRun, RankRun, run_cluster
from tonnage.virtual.cluster.recorded import recorded

__all__ = ["ClusterRun", "RankRun", "recorded", "run_cluster"]

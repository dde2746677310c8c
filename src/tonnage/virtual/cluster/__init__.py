"""The virtual cluster: an unmodified torchrun script on GPUs that are not there, one process for each distinct rank."""

from tonnage.virtual.cluster.cluster import ClusterRun, RankRun, recorded, run_cluster

__all__ = ["ClusterRun", "RankRun", "recorded", "run_cluster"]

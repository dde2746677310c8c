"""The virtual cluster: runs an unmodified torchrun script on virtual GPUs, with one process for each distinct rank."""

from tonnage.virtual.cluster.cluster import ClusterRun, RankRun, recorded, run_cluster

__all__ = ["ClusterRun", "RankRun", "recorded", "run_cluster"]

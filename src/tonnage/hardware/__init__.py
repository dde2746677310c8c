"""The catalogue of GPUs, their hosts, and clusters of them."""

from tonnage.hardware.catalogue import all_gpus, find_cuda_gpu, find_gpu
from tonnage.hardware.cluster import Cluster, Host, all_hosts, find_cluster
from tonnage.hardware.gpu import Gpu

__all__ = ["Cluster", "Gpu", "Host", "all_gpus", "all_hosts", "find_cluster", "find_cuda_gpu", "find_gpu"]

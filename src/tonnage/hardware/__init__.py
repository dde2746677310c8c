"""The catalogue of GPUs."""

from tonnage.hardware.catalogue import all_gpus, find_gpu
from tonnage.hardware.gpu import Gpu, Overhead

__all__ = ["Gpu", "Overhead", "all_gpus", "find_gpu"]

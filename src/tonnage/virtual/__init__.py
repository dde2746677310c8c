"""The virtual GPU: runs PyTorch as if on a given GPU, without the hardware."""

from tonnage.virtual.context import VirtualGpu, virtual_gpu
from tonnage.virtual.script import run_script

__all__ = ["VirtualGpu", "run_script", "virtual_gpu"]

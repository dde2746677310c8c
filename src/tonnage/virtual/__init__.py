"""The virtual GPU: runs PyTorch as if on a given GPU, without the hardware."""

from tonnage.virtual.script import VirtualGpu, run_script, virtual_gpu

__all__ = ["VirtualGpu", "run_script", "virtual_gpu"]

"""The virtual GPU: PyTorch on a card that is not there."""

from tonnage.virtual.context import VirtualGpu, virtual_gpu
from tonnage.virtual.script import run_script

__all__ = ["VirtualGpu", "run_script", "virtual_gpu"]

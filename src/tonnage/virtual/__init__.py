"""The virtual GPU: PyTorch on a card that is not there."""

from tonnage.virtual.script import run_script

__all__ = ["run_script"]

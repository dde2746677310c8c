"""Recordings of a real GPU: PyTorch's memory history combined with hooks on the script. Requires torch and CUDA."""

from tonnage.recorder.recorder import Recorder, record_on_oom, record_script

__all__ = ["Recorder", "record_on_oom", "record_script"]

"""Recordings of a real GPU: PyTorch's memory history combined with hooks on the script. Requires torch and CUDA."""

from tonnage.recording.cuda.recorder import Recorder, record_script
from tonnage.recording.cuda.watchdog import record_on_oom

__all__ = ["Recorder", "record_on_oom", "record_script"]

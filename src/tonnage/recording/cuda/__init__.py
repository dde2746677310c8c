"""Recordings of a real GPU: PyTorch's own memory history beside what hooks see of the script. It needs torch and CUDA."""

from tonnage.recording.cuda.recorder import Recorder, record_script
from tonnage.recording.cuda.watchdog import record_on_oom

__all__ = ["Recorder", "record_on_oom", "record_script"]

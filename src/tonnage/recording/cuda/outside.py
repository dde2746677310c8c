"""What lies on the GPU outside PyTorch's allocator: this process's context and libraries, and other processes.

NVML is asked from a thread a few times a second, because what another process takes may be gone again at the end. Without
NVML nothing is known, and nothing is said.
"""

import os
import threading

from tonnage.errors import TonnageError
from tonnage.hardware.nvml import open_nvml

_INTERVAL_S = 0.5


class Outside:
    """Asks between `start` and `stop`."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.others_bytes = 0
        self.process_bytes = 0

    def start(self) -> None:
        """Ask from now on."""
        self._thread = threading.Thread(target=self._follow, name="tonnage-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no longer."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def ask(self, reserved_bytes: int) -> tuple[int, dict[str, int]]:
        """What this process holds beyond what PyTorch reserved, and what others held at most."""
        try:
            with open_nvml() as nvml:
                self._look(nvml.sample())
        except TonnageError:
            pass
        others = {"other processes": self.others_bytes} if self.others_bytes else {}
        return max(0, self.process_bytes - reserved_bytes), others

    def _follow(self) -> None:
        try:
            with open_nvml() as nvml:
                while not self._ended.wait(_INTERVAL_S):
                    self._look(nvml.sample())
        except TonnageError:
            return

    def _look(self, gpus: tuple[object, ...]) -> None:
        gpu = gpus[self._device]
        held = {process.pid: process.used_bytes or 0 for process in gpu.processes}  # type: ignore[attr-defined]
        self.process_bytes = held.pop(os.getpid(), 0)
        self.others_bytes = max(self.others_bytes, sum(held.values()))

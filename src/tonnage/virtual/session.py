"""A virtual GPU from start to end: loads it into the process, hooks PyTorch, and hands over what was recorded."""

import atexit
import ctypes
import os
import threading
import time
from typing import Any

from tonnage.allocator import AllocatorSettings
from tonnage.hardware import Gpu
from tonnage.recording import Header, Recording
from tonnage.virtual.companions import install_companions
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.device import Device
from tonnage.virtual.loading import load
from tonnage.virtual.standins import StandIns
from tonnage.virtual.workspaces import Workspaces

_open = threading.Lock()


class Session:
    """One virtual GPU in this process. Only one can be open at a time.

    Of several `cards` a rank of a cluster uses its own one; all of them are this one here.
    """

    def __init__(
        self,
        gpu: Gpu,
        torch_version: str | None = None,
        settings: AllocatorSettings | None = None,
        cards: int = 1,
    ) -> None:
        self.library = load()
        import torch

        self.torch = torch
        self.gpu = gpu
        self.cards = cards
        self.modelled = torch_version or torch.__version__.split("+")[0]
        self.settings = settings or AllocatorSettings.from_environment(os.environ, version_pair(self.modelled))
        self.device = Device(gpu, version_pair(self.modelled), self.settings)
        self.stand_ins = StandIns(self.device.attribution.line)
        self.workspaces = Workspaces(self.device)
        self._undo: list[Any] = []
        self._started = time.perf_counter()

    def open(self) -> None:
        """From here on, `cuda` is this card."""
        from tonnage.script.hooks import install_hooks
        from tonnage.virtual import cuda

        if not _open.acquire(blocking=False):
            raise RuntimeError("A virtual GPU is open in this process already; leave its `with` block first.")
        device = self.device
        self._callbacks = [device.malloc, device.free, device.record_stream, device.synchronize]
        self.library.tonnage_set_cudnn_version(release_of(device.torch_version).cudnn_number)
        self.library.tonnage_start(*map(ctypes.py_object, self._callbacks), self.cards)
        self._listeners = [self.stand_ins.read, self.stand_ins.unmodelled, self.workspaces.use]
        self.library.tonnage_listen(*map(ctypes.py_object, self._listeners))
        device.native_context = ctypes.c_int32.in_dll(self.library, "tonnage_context")
        current(self)
        self._undo += [install_hooks(device.attribution), cuda.install(device, self.library, self.cards)]
        self._undo.append(install_companions(self.stand_ins))
        atexit.register(self.library.tonnage_close)

    def close(self) -> None:
        """Leave the card; tensors still on it are dropped silently from now on."""
        self.device.attribution.finish()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.library.tonnage_close()
        current(None)
        _open.release()

    def recording(self, **header: Any) -> Recording:
        """What happened so far."""
        held, peak, requested = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        self.library.tonnage_pinned(ctypes.byref(held), ctypes.byref(peak), ctypes.byref(requested))
        device = self.device
        described = Header(
            gpu=self.gpu.key,
            gpu_name=self.gpu.name,
            capacity_bytes=self.gpu.memory_bytes,
            torch_modelled=self.modelled,
            torch_installed=self.torch.__version__,
            settings=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
            wall_seconds=time.perf_counter() - self._started,
            overhead_bytes=device.overheads.total_bytes,
            overhead_parts=dict(device.overheads.parts),
            pinned_host_bytes=peak.value,
            **header,
        )
        stand_ins, notes = self.stand_ins.records(), self.stand_ins.notes()
        return Recording(described, device.allocations, device.segments, device.marks, stand_ins, notes)


_current: Session | None = None


def current(session: Session | None) -> None:
    """Make this the session that kernels ask."""
    global _current
    _current = session


def active() -> Session:
    """The open session."""
    assert _current is not None, "no virtual GPU is open"
    return _current


def version_pair(version: str) -> tuple[int, int]:
    """ "2.11.0" -> (2, 11)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)

"""The virtual GPU of a CPU build of torch: a device on the CUDA key, host code of operators, a model of the allocator."""

import atexit
import ctypes
import os
from typing import Any

from tonnage.allocator import AllocatorSettings
from tonnage.hardware import Gpu
from tonnage.virtual.companions import install_companions
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.device import Device
from tonnage.virtual.loading import load
from tonnage.virtual.session import Session, version_pair
from tonnage.virtual.standins import StandIns
from tonnage.virtual.workspaces import Workspaces


class ModelledSession(Session):
    """The session that our kernels access through `session.active()`."""

    device: Device

    def __init__(self, gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> None:
        self.library = load()
        import torch

        super().__init__(gpu, torch, torch_version, cards)
        version = version_pair(self.modelled)
        self.device = Device(gpu, version, AllocatorSettings.from_environment(os.environ, version))
        self.stand_ins = StandIns(self.device.attribution.line)
        self.workspaces = Workspaces(self.device)

    @property
    def pinned_peak_bytes(self) -> int:
        held, peak, requested = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        self.library.tonnage_pinned(ctypes.byref(held), ctypes.byref(peak), ctypes.byref(requested))
        return peak.value

    def _install(self) -> None:
        from tonnage.script.hooks import install_hooks
        from tonnage.virtual import cuda

        device = self.device
        self._callbacks = [device.malloc, device.free, device.record_stream, device.synchronize]
        self.library.tonnage_set_cudnn_version(release_of(device.torch_version).cudnn_number)
        self.library.tonnage_start(*map(ctypes.py_object, self._callbacks), self.cards)

        def tell_host(*event: Any) -> None:
            if self.host:
                self.host.event(*event)

        self._tell_host = tell_host
        self.library.tonnage_listen_host(ctypes.py_object(tell_host))
        self._listeners = [self.stand_ins.read, self.stand_ins.unmodelled, self.workspaces.use, self.laws.follow]
        self.library.tonnage_listen(*map(ctypes.py_object, self._listeners))
        device.native_context = ctypes.c_int32.in_dll(self.library, "tonnage_context")
        self._undo += [install_hooks(device.attribution), cuda.install(device, self.library, self.cards)]
        self._undo.append(install_companions(self.stand_ins, self.gpu))
        atexit.register(self.library.tonnage_close)

    def _uninstall(self) -> None:
        self.library.tonnage_listen_host(ctypes.py_object(None))
        self.library.tonnage_close()

    def is_known(self, tensor: Any) -> bool:
        return bool(self.library.tonnage_is_known(tensor.untyped_storage()._cdata))

    def forget(self, tensor: Any) -> None:
        self.library.tonnage_forget(tensor.untyped_storage()._cdata)

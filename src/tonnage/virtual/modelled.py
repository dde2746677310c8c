"""The virtual GPU of a CPU build of torch: a device on the CUDA key, host code of operators, a model of the allocator."""

import atexit
import ctypes
import os
import re
import threading
import tomllib
from pathlib import Path
from typing import Any

from tonnage.allocator import AllocatorSettings
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.virtual.companions import install_companions
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.device import Device
from tonnage.virtual.loading import load
from tonnage.virtual.session import Session, version_pair
from tonnage.virtual.standins import StandIns

_WORKSPACES = Path(__file__).parent / "data" / "workspaces.toml"


class ModelledSession(Session):
    """The session that our kernels access through `session.active()`."""

    device: Device

    def __init__(self, gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> None:
        self.library = load()
        import torch

        super().__init__(gpu, torch, torch_version, cards)
        version = version_pair(self.modelled)
        self.device = Device(gpu, version, AllocatorSettings.from_environment(os.environ, version))
        self.stand_ins = StandIns(self.device.attribution.line, self.device.held)
        self.workspaces = Workspaces(self.device)

    @property
    def pinned_peak_bytes(self) -> int:
        return int(self.library.tonnage_pinned_peak())

    def _install(self) -> None:
        from tonnage.script.hooks import install_hooks
        from tonnage.virtual import cuda

        device = self.device
        self._callbacks = [device.malloc, device.free, device.record_stream, device.synchronize]
        self.library.tonnage_set_cudnn_version(release_of(device.torch_version).cudnn_number)
        self.library.tonnage_start(*map(ctypes.py_object, self._callbacks), self.cards)

        self._tell_host = lambda *event: self.host.event(*event) if self.host else None
        self.library.tonnage_listen_host(ctypes.py_object(self._tell_host))
        self._listeners = [self.stand_ins.read, self.stand_ins.unmodelled, self.workspaces.use, self.laws.follow]
        self.library.tonnage_listen(*map(ctypes.py_object, self._listeners))
        device.native_context = ctypes.c_int32.in_dll(self.library, "tonnage_context")
        self._undo += [install_hooks(device.attribution), cuda.install(device, self.library, self.cards)]
        self._undo.append(install_companions(self.stand_ins, self.gpu))
        atexit.register(self.library.tonnage_close)

    def _uninstall(self) -> None:
        for setting, instead in self.device.allocator.settings.not_modelled.items():
            self.stand_ins.unmodelled(setting, instead)
        self.library.tonnage_listen_host(ctypes.py_object(None))
        self.library.tonnage_close()

    def is_known(self, tensor: Any) -> bool:
        return bool(self.library.tonnage_is_known(tensor.untyped_storage()._cdata))

    def forget(self, tensor: Any) -> None:
        self.library.tonnage_forget(tensor.untyped_storage()._cdata)


class Workspaces:
    """Workspaces that cuBLAS and cuBLASLt take from the caching allocator and keep, by host thread and stream.

    The sizes are in `data/workspaces.toml`, by compute capability and torch version.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[tuple[str, int, int], Any] = {}
        rows = tomllib.loads(_WORKSPACES.read_text())["workspace"]
        self._rows = [row for row in rows if tuple(row["torch"]) <= device.torch_version]

    def use(self, library: str) -> None:
        """Allocate the library's workspace for the calling thread and its current stream, if it has none."""
        import torch

        key = (library, threading.get_ident(), torch.cuda.current_stream().stream_id)
        is_kept = self._row(library).get("kept", True)
        if key in self._held and is_kept:
            return
        if key not in self._held:
            self._device.use(library, 1 + sum(name == library for name, *_ in self._held))
        size = self.size_bytes(library)
        held = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        if held is not None:
            self._device.categorise(Category.WORKSPACE, [held.data_ptr()], None)
        self._held[key] = held if is_kept else None

    def clear(self) -> None:
        self._held.clear()

    def size_bytes(self, library: str) -> int:
        """Return the workspace size: from the environment if set, else for this card and version."""
        size = int(self._row(library).get("bytes", 0))
        if library == "cublas":
            # ":4096:2:16:8" means two buffers of 4096 KiB and eight of 16.
            pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
            return sum(int(kib) * 1024 * int(count) for kib, count in pairs) if pairs else size
        if library == "cublaslt":
            # Never more than cuBLAS has, and 0 if the environment unifies them.
            if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
                return 0
            kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
            return min(int(kib) * 1024 if kib.isdigit() else size, self.size_bytes("cublas"))
        return size

    def _row(self, library: str) -> dict[str, Any]:
        major = self._device.gpu.compute_capability[0]
        fitting = [
            row for row in self._rows if row["library"] == library and major in row.get("capability_majors", [major])
        ]
        return fitting[-1] if fitting else {}

"""The virtual GPU of a CUDA build of torch: everything above the CUDA libraries is real, and these are stand-ins."""

import ctypes
import re
from typing import Any

from tonnage.garbage import no_collection
from tonnage.hardware import Gpu
from tonnage.virtual.companions import install_companions
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.driver import answers, loading
from tonnage.virtual.driver.device import DriverDevice, DriverTrace
from tonnage.virtual.driver.following import Follower
from tonnage.virtual.driver.unwritten import Unwritten
from tonnage.virtual.driver.values import DriverValues
from tonnage.virtual.session import Session, version_pair
from tonnage.virtual.standins import StandIns

_EVENTS = ctypes.CFUNCTYPE(None)
_ANSWER = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_char_p)
_UNKNOWN_FUNCTION = "a function of a CUDA library that the virtual GPU does not know; it failed"
_ASSUMED_KERNELS = "One whose machine code could not be read is taken to use 32 registers a thread."


class DriverSession(Session):
    """A session with virtual cards below torch."""

    device: DriverDevice

    def __init__(self, gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> None:
        installed, _ = loading.installed_version(loading.torch_root())
        self.core = loading.prepare(gpu, cards)
        version = version_pair(installed)
        with no_collection():
            import torch
        # `torch._C._cuda_getArchFlags` would tell, too, but after it no forked child could use the card.
        built_for = " ".join(re.findall(r"code=(\w+)", torch._C._show_config())) or release_of(version).architectures
        loading.choose_code(self.core, gpu, installed, built_for)
        super().__init__(gpu, torch, installed.split("+")[0], cards)
        self.device = DriverDevice(gpu, version, self.core, torch)
        self.stand_ins = StandIns(self.device.attribution.line)
        if torch_version and version_pair(torch_version) != version:
            words = (
                f"The installed {installed} ran as it is, not {torch_version}: a CUDA build models no other version."
            )
            self.stand_ins.assume("torch", words)
        self.history = DriverTrace(self.device, torch)
        self.follower = Follower(torch)
        self.values = DriverValues(self, torch)
        self.unwritten = Unwritten(self.follower, torch)
        self.device.on_freed = self.values.dropped
        self.is_known, self.forget = self.values.is_known, self.values.forget

    @property
    def pinned_peak_bytes(self) -> int:
        self.core.tn_pinned_peak_bytes.restype = ctypes.c_int64
        return int(self.core.tn_pinned_peak_bytes())

    def _install(self) -> None:
        from tonnage.script.hooks import install_hooks

        self._callbacks = (_EVENTS(self.device.catch_up), _ANSWER(self._answer))
        self.core.tn_answer_with(self._callbacks[1])
        self.core.tn_lift_limit(0)
        self.core.tn_open(self._callbacks[0])
        self._undo += [install_hooks(self.device.attribution), self.history.install(), self.follower.release]
        self.values.install()
        self.unwritten.install()
        self._undo.append(install_companions(self.stand_ins, self.gpu))

    def _uninstall(self) -> None:
        self.device.drain()
        self.core.tn_close()
        # Unsupported functions of CUDA's libraries that were called.
        library, name, calls, at = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_longlong(), 0
        while self.core.tn_unknown_at(at, ctypes.byref(library), ctypes.byref(name), ctypes.byref(calls)):
            at += 1
            what = f"{(library.value or b'').decode()}: {(name.value or b'').decode()}"
            for _ in range(min(calls.value, 1000)):
                self.stand_ins.unmodelled(what, _UNKNOWN_FUNCTION)
        if self.core.tn_assumed_kernels():
            self.stand_ins.assume("kernels", _ASSUMED_KERNELS)

    def recording(self, **header: Any) -> Any:
        self.device.drain()
        self.history.take()
        return super().recording(**header)

    def _answer(self, question: bytes) -> int:
        if question.startswith(b"grant "):
            return int(self.device.grants(int(question.partition(b"=")[2])))
        return answers.answer(question.decode(), self.device, self.stand_ins.assume)

"""A virtual GPU session: replaces CUDA in the process, hooks PyTorch, and returns the recording.

What replaces CUDA depends on the build of torch: `modelled` for CPU builds, `driver` for CUDA builds (see `builds`).
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from tonnage.allocator.settings import VARIABLES
from tonnage.errors import RequestError
from tonnage.garbage import watch_collections
from tonnage.hardware import Gpu
from tonnage.hardware.cluster import Cluster
from tonnage.recording import Header, Recording
from tonnage.virtual import process_memory
from tonnage.virtual.assumptions import Laws
from tonnage.virtual.host_memory import HostMeter
from tonnage.virtual.recorded import RecordedDevice
from tonnage.virtual.standins import StandIns

if TYPE_CHECKING:
    from tonnage.script.capture import StepCapture
    from tonnage.virtual.modelled import ModelledSession

_open = threading.Lock()
_ONE_CARD = "One process has tensors on {} cards. They are taken as one card, and its figures are their sum."


class Session:
    """One virtual GPU in this process. Only one can be open at a time.

    With several `cards`, a rank of a cluster uses its own one; here they are all this one.
    """

    device: RecordedDevice
    stand_ins: StandIns  # what the script read from the card, and what was assumed
    pinned_peak_bytes: int  # of host memory
    _install: Callable[[], None]  # replaces CUDA
    _uninstall: Callable[[], None]
    is_known: Callable[[Any], bool]  # whether the values of a tensor on the card are known
    forget: Callable[[Any], None]  # marks them as unknown

    def __init__(self, gpu: Gpu, torch: Any, torch_version: str | None, cards: int) -> None:
        self.torch = torch
        self.gpu = gpu
        self.cards = cards
        self.modelled = torch_version or torch.__version__.split("+")[0]
        self.laws = Laws()
        self._undo: list[Callable[[], None]] = []
        self._capture: StepCapture | None = None
        self.host: HostMeter | None = None
        self.cluster: Cluster | None = None  # the cluster that this card is a rank of
        self._started = time.perf_counter()

    def open(self, *, capture: bool = False) -> None:
        """Make `cuda` this card; with `capture`, record the calls of a typical step."""
        if not _open.acquire(blocking=False):
            raise RuntimeError("A virtual GPU is open in this process already; leave its `with` block first.")
        current(self)
        self._undo.append(watch_collections())
        # Imports torch, which must come after what replaces CUDA.
        from tonnage.virtual.compiling import source_of

        self.device.attribution.lines.source_of = source_of
        self._install()
        if process_memory.is_known():
            self.host = HostMeter(self.device)
            self._undo.append(self.host.install(self.torch))
            self.device.attribution.host = self.host
        self._leave_out_checksums()
        if capture:
            from tonnage.script.capture import StepCapture

            self._capture = StepCapture(self.device.attribution, self.stand_ins.assume)
            self._undo.append(self._capture.install())

    def _leave_out_checksums(self) -> None:
        """Save without checksums, which read every byte of a checkpoint; `torch.load` does not check them."""
        serialization = self.torch.serialization
        if not hasattr(serialization, "set_crc32_options"):  # before torch 2.6
            return
        chosen = serialization.get_crc32_options()
        serialization.set_crc32_options(False)
        self._undo.append(lambda: serialization.set_crc32_options(chosen))

    def close(self) -> None:
        """Close the card; tensors still on it are dropped silently from now on."""
        self.device.attribution.finish()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._uninstall()
        if len(self.device.cards) > 1:
            self.stand_ins.assume("several cards", _ONE_CARD.format(len(self.device.cards)))
        current(None)
        _open.release()

    def uncaptured(self) -> AbstractContextManager[None]:
        """Return a context whose contents do not count as a step of the script."""
        return self._capture.paused() if self._capture else nullcontext()

    def recording(self, **header: Any) -> Recording:
        """Return the recording so far."""
        device, parts = self.device, dict(self.device.overhead_parts)
        described = Header(
            gpu=self.gpu.key,
            gpu_name=self.gpu.name,
            capacity_bytes=self.gpu.memory_bytes,
            torch_modelled=self.modelled,
            torch_installed=self.torch.__version__,
            settings=next((os.environ[name] for name in VARIABLES if name in os.environ), ""),
            wall_seconds=time.perf_counter() - self._started,
            overhead_bytes=sum(parts.values()),
            overhead_parts=parts,
            pinned_host_bytes=self.pinned_peak_bytes,
            training=dict(device.attribution.training),
            **header,
        )
        stand_ins, notes = self.stand_ins.records(), self.stand_ins.notes()
        captured = self._capture.captured if self._capture else None
        host = self.host.memory() if self.host else None
        return Recording(
            described, device.allocations, device.segments, device.marks, stand_ins, notes, captured=captured, host=host
        )


_current: Session | None = None


def current(session: Session | None) -> None:
    """Set the session that kernels use."""
    global _current
    _current = session


def active() -> "ModelledSession":
    """Return the open session, for kernels of a CPU build."""
    assert _current is not None, "no virtual GPU is open"
    return cast("ModelledSession", _current)


def version_pair(version: str) -> tuple[int, int]:
    """Return the major and minor version: "2.11.0" -> (2, 11)."""
    try:
        major, minor = (int(number) for number in version.split(".")[:2])
    except (ValueError, AttributeError):
        raise RequestError(f"{version!r} is not a version of torch.", hint='Write it like "2.11".') from None
    return major, minor

"""Streams and events. Ids, pools and the current stream are native; nothing runs, so everything has always finished.

PyTorch created `Stream` and `Event` at import from empty base classes. A class based on C structures cannot get
another base later, so the file that defines them, torch/cuda/streams.py, is executed again with real bases.
"""

import importlib.util
import sys
import time
from typing import Any

import torch

from tonnage.virtual.cuda import graphs
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.unmodelled import UnmodelledCall

CUDA = 1  # c10::DeviceType
_NATIVE_STREAM, _LEVEL_SHIFT, _LEVELS = 1, 1, 15  # a pool's stream has an odd id; see native/device.cpp


class _CudaStreamBase(torch.Stream):
    """A native stream of a card; its handle is its id."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
    ) -> Any:
        if stream_id or device_index or device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        index = torch._C._cuda_getDevice()
        if stream_ptr:
            return super().__new__(cls, stream_id=stream_ptr, device_index=index, device_type=CUDA)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def priority(self) -> int:
        """0 for an ordinary stream, negative for higher priority."""
        return 1 - (self.stream_id >> _LEVEL_SHIFT & _LEVELS) if self.stream_id & _NATIVE_STREAM else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


class _CudaEventBase(torch.Event):
    """A native event; elapsed times are the host's."""

    _is_timed: bool
    _recorded_ns: int | None
    _stream_id: int

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        self = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        self._is_timed, self._recorded_ns, self._stream_id = enable_timing, None, -1
        return self

    def record(self, stream: torch.Stream) -> None:
        super().record(stream)
        self._stream_id, self._recorded_ns = stream.stream_id, time.perf_counter_ns()

    def wait(self, stream: torch.Stream) -> None:
        """Return at once; if the event's stream is captured, so is this one from now on."""
        super().wait(stream)
        graphs.join(self._stream_id, stream.stream_id)

    @property
    def cuda_event(self) -> int:
        """The handle; 0 until the event is recorded."""
        return self.event_id

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two events."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6

    def ipc_handle(self) -> bytes:
        """Raise NotModelled: events cannot be shared between processes."""
        raise UnmodelledCall("events that are shared between processes")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
        """Raise NotModelled: events cannot be shared between processes."""
        raise UnmodelledCall("events that are shared between processes")


def install(cards: Cards, patches: Patches) -> None:
    """Supply the base classes and functions, then re-create PyTorch's classes."""

    def chosen(index: int) -> int:
        return cards.selected if index < 0 else index

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        if device_index != cards.selected:
            cards.selected = device_index
        cards.set_stream(device_index, stream_id)

    functions = {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_cuda_getCurrentStream": lambda index: (cards.stream(index), chosen(index), CUDA),
        "_cuda_getDefaultStream": lambda index: (0, chosen(index), CUDA),
        "_cuda_getCurrentRawStream": cards.stream,
        "_cuda_getStreamFromExternal": lambda handle, index: (handle, chosen(index), CUDA),
        "_cuda_setStream": set_stream,
    }
    patches.set_all(torch._C, functions)
    spec = importlib.util.find_spec("torch.cuda.streams")
    assert spec is not None and spec.loader is not None, "torch.cuda.streams has no source"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patches.set_item(sys.modules, "torch.cuda.streams", module)
    patches.set(torch.cuda, "streams", module)
    for name in ("Stream", "Event", "ExternalStream"):
        patches.set(torch.cuda, name, getattr(module, name))

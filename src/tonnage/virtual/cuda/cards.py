"""The cards of this process with the calling thread's current card and stream (stored natively), and the functions of
a CUDA build that need no code: constants and refusals, in `functions.toml`.
"""

import ctypes
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tonnage.errors import TonnageError
from tonnage.virtual.device import Device

_OUT_OF_RANGE = (
    "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class Cards:
    """All cards, by index."""

    def __init__(self, device: Device, count: int, library: ctypes.PyDLL) -> None:
        self.devices = (device,) * count
        self.library = library

    def __len__(self) -> int:
        return len(self.devices)

    def at(self, index: int | None = None) -> Device:
        """Return a card; None and -1 mean the selected one."""
        if index is None or index < 0:
            return self.devices[self.selected]
        self.check(index)
        return self.devices[index]

    def check(self, index: int) -> None:
        """Raise CUDA's error for a card index that does not exist."""
        if not 0 <= index < len(self.devices):
            raise torch.AcceleratorError(_OUT_OF_RANGE)

    @property
    def selected(self) -> int:
        """The card that the calling thread has selected."""
        return int(self.library.tonnage_current_device())

    @selected.setter
    def selected(self, index: int) -> None:
        self.check(index)
        self.library.tonnage_set_device(index)

    def stream(self, index: int | None = None) -> int:
        """Return the id of a card's current stream."""
        return int(self.library.tonnage_current_stream(self.selected if index is None or index < 0 else index))

    def memory_info(self, index: int) -> tuple[int, int]:
        """Return a card's free and total bytes."""
        allocator = self.at(index).allocator
        return allocator.free_bytes, allocator.capacity_bytes


class UnmodelledCall(TonnageError, RuntimeError):
    """Raised when a script uses something that the virtual GPU does not model."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The virtual GPU does not model {what}.",
            hint="Leave this part out of the virtual run, or record a real one.",
        )


def refusal(what: str) -> Callable[..., Any]:
    """Return a function that raises UnmodelledCall."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnmodelledCall(what)

    return refuse


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "functions.toml").read_text())


def refusals() -> dict[str, Callable[..., Any]]:
    """Return the functions of `torch._C` that are not supported, each with its error."""
    return {name: refusal(what) for name, what in _table()["refused"].items()}


def constants(module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that return a constant."""
    values = dict(_table()[module])
    values |= dict.fromkeys(values.pop("nothing", ()))
    return {name: lambda *_, value=value, **__: value for name, value in values.items()}

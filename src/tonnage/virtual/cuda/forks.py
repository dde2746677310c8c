"""CUDA in forked children: a process forked after CUDA was initialised cannot use it, as on a real card.

Data-loader workers are such children: their CPU work continues, `is_available` still answers, and nothing they do
reaches the parent's recording, which the fork copied.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches

_CUDA = 1  # c10::DeviceType
_REQUIRE_INIT = "_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"


class _Process:
    """Whether CUDA was initialised in this process, or in a parent before the fork."""

    touched = False
    in_bad_fork = False


def touch() -> None:
    """Note that CUDA was used: later forks cannot use it."""
    _Process.touched = True


@contextmanager
def untouched() -> Iterator[None]:
    """Do not count what happens inside as a use of CUDA, so that later forks still can use it."""
    before = _Process.touched
    try:
        yield
    finally:
        _Process.touched = before


def is_in_bad_fork() -> bool:
    return _Process.in_bad_fork


def require_init() -> None:
    """Make PyTorch's native side call `torch.cuda._lazy_init` again before the next tensor on the device."""
    python_side = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    getattr(python_side, _REQUIRE_INIT)(ctypes.c_int8(_CUDA), ctypes.c_bool(True))


def _after_fork() -> None:
    if _Process.touched:
        _Process.in_bad_fork = True
        require_init()


os.register_at_fork(after_in_child=_after_fork)


def install(cards: Cards, patches: Patches) -> None:
    """Reset the state, now and on undo."""
    patches.set(_Process, "touched", False)
    patches.set(torch._C, "_cuda_isInBadFork", is_in_bad_fork)
    patches.set(torch.cuda, "_is_in_bad_fork", is_in_bad_fork)
    require_init()
    patches.on_undo(require_init)

"""What a forked child may do: a process that CUDA was touched in before the fork cannot use it, as on a real card.

Data-loader workers are such children: their work on the CPU goes on, `is_available` still answers, and nothing of
theirs reaches the parent's record, which the fork copied.
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
    """Whether CUDA was touched in this process, and whether it was in a parent."""

    touched = False
    in_bad_fork = False


def touch() -> None:
    """A fork after this leaves the child without CUDA."""
    _Process.touched = True


@contextmanager
def untouched() -> Iterator[None]:
    """What happens inside is no use of the card by the script: a fork after it is fine."""
    before = _Process.touched
    try:
        yield
    finally:
        _Process.touched = before


def is_in_bad_fork() -> bool:
    return _Process.in_bad_fork


def require_init() -> None:
    """Let PyTorch's native side call `torch.cuda._lazy_init` again before the next tensor on the device."""
    python_side = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    getattr(python_side, _REQUIRE_INIT)(ctypes.c_int8(_CUDA), ctypes.c_bool(True))


def _after_fork() -> None:
    if _Process.touched:
        _Process.in_bad_fork = True
        require_init()


os.register_at_fork(after_in_child=_after_fork)


def install(cards: Cards, patches: Patches) -> None:
    """Start untouched; at the end, start over."""
    patches.set(_Process, "touched", False)
    patches.set(torch._C, "_cuda_isInBadFork", is_in_bad_fork)
    patches.set(torch.cuda, "_is_in_bad_fork", is_in_bad_fork)
    require_init()
    patches.on_undo(require_init)

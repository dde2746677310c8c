"""Triton if it is installed; otherwise stand-ins, so that the kernel files with the plain versions can be imported."""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, no-redef"

from types import SimpleNamespace
from typing import Any

__all__ = ["HAS_TRITON", "jit", "next_power_of_2", "tl"]

jit: Any
tl: Any
try:
    import triton
    import triton.language as tl

    jit = triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    tl = SimpleNamespace(constexpr=lambda value: value)

    def jit(function=None, **_options):
        return jit if function is None else function


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()

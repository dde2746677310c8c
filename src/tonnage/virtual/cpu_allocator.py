"""What torch's CPU allocator takes from the system for a large tensor.

Wheels for x86 use the system's own `posix_memalign`, which maps large blocks as they are. Those for ARM come with mimalloc, which
places them in segments and asks for huge pages, of which the system gives whole ones. Where things lie was seen by filling
tensors of many sizes (tests/virtual/test_cpu_allocator.py).
"""

import mmap
from functools import cache
from pathlib import Path

from tonnage.units import KIB, MIB

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGE = 2 * MIB
_SEGMENT = 32 * MIB
_SLOT = MIB // 2
_BEFORE = 64 * KIB  # a segment's own bytes come first


@cache
def takes_huge_pages(torch_root: Path) -> bool:
    """Whether this torch allocates by mimalloc, on a system that gives it huge pages."""
    library = torch_root / "lib" / "libc10.so"
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text() or not library.exists():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(b"mimalloc_") >= 0


def footprint_bytes(size: int) -> int:
    """Of a large tensor under mimalloc: its share of the huge pages of a segment that is full of such tensors."""
    slot = _rounded(size + 1, _SLOT)
    held = max((_SEGMENT - _BEFORE) // slot, 1)
    return _rounded(_BEFORE + (held - 1) * slot + size, _HUGE_PAGE) // held


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit

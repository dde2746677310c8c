"""Memory of this process as Linux reports it, and of a plain process that has only imported torch.

The virtual GPU itself takes host memory; the plain process shows how much of it a real run would not need.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from tonnage.units import KIB, MIB
from tonnage.virtual.cache import cache_folder

PAGE = os.sysconf("SC_PAGE_SIZE")
_SMALLEST_FILE = 1 << 20
_PROBES = (
    "import torch",
    # NVIDIA's libraries may be missing; the stand-ins replace them.
    "from tonnage.virtual.builds import preload; preload()",
)
_TELL = """
print(*(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(("RssAnon", "RssFile"))))
"""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Resident:
    """Resident pages of a process, in bytes, by type."""

    anonymous_bytes: int = 0
    file_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class MappedFile:
    """A range of a file that is mapped as data, not a library."""

    start: int
    end: int
    path: str


def is_known() -> bool:
    """Whether this system has the /proc files that are read here."""
    return os.path.exists("/proc/self/smaps")


def resident() -> Resident:
    """Return the resident memory of this process."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status if line.startswith("Rss"))
    return Resident(*(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")))


def resident_bytes(blocks: Iterable[tuple[int, int]]) -> int:
    """Return the resident bytes of anonymous ranges (address, size)."""
    pages = 0
    for address, size in blocks:
        start = address - address % PAGE
        length = -(-(address + size - start) // PAGE)
        seen = ctypes.create_string_buffer(length)
        if not _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length * PAGE), seen):
            pages += length - seen.raw[:length].count(b"\0")
    return pages * PAGE


def is_mapped(address: int) -> bool:
    """Whether any memory is mapped at an address."""
    page = ctypes.c_void_p(address - address % PAGE)
    return not _libc.mincore(page, ctypes.c_size_t(PAGE), ctypes.create_string_buffer(1))


def is_shared(address: int) -> bool:
    """Whether a file or shared memory is mapped at an address."""
    return next((inode != "0" for start, end, _, _, inode, _ in _mappings() if start <= address < end), False)


def _mappings() -> Iterator[tuple[int, int, str, str, str, str]]:
    """Yield start, end, permissions, device, inode and path of every mapping of this process."""
    with open("/proc/self/maps") as maps:
        for row in maps:
            stretch, kind, _, device, inode, *path = row.split(maxsplit=5)
            start, end = stretch.split("-")
            yield int(start, 16), int(end, 16), kind, device, inode, path[0].rstrip("\n") if path else ""


def mapped_files() -> list[MappedFile]:
    """Return mapped files of 1 MiB or more that are not libraries."""
    code: set[str] = set()
    found: list[MappedFile] = []
    for start, end, kind, device, _, path in _mappings():
        if not path.startswith("/") or path.startswith("/dev/") or device == "00:01":
            continue
        if "x" in kind:
            code.add(path)
        if end - start >= _SMALLEST_FILE and ".so" not in path:
            found.append(MappedFile(start, end, path))
    return [file for file in found if file.path not in code]


def read_pages(files: Iterable[MappedFile]) -> dict[MappedFile, int]:
    """Return the resident bytes of each file that are unmodified."""
    wanted = {f"{file.start:08x}-{file.end:08x}": file for file in files}
    found: dict[MappedFile, int] = {}
    at: MappedFile | None = None
    if not wanted:
        return found
    with open("/proc/self/smaps") as rows:
        for row in rows:
            name = row.partition(" ")[0]
            if not name.endswith(":"):
                at = wanted.get(name)
            elif at and name == "Rss:":
                found[at] = int(row.split()[1]) << 10
            elif at and name == "Anonymous:":  # written to, so no longer the file's
                found[at] -= int(row.split()[1]) << 10
    return found


def of_children() -> int:
    """Return the private memory of child processes, in bytes."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            for child in Path(f"/proc/self/task/{task}/children").read_text().split():
                with suppress(OSError):
                    rows = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
                    total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_Dirty"))
    return total


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def plain_process(torch_root: Path) -> Resident:
    """Return the memory of a process that has only imported this torch; measured once and cached."""
    facts = f"{torch_root} {(torch_root / 'version.py').read_text()} {sys.version}"
    kept = cache_folder() / f"plain-{sha256(facts.encode()).hexdigest()[:20]}.json"
    with suppress(OSError, ValueError, TypeError):
        return Resident(**json.loads(kept.read_text()))
    for probe in _PROBES:
        run = subprocess.run([sys.executable, "-c", probe + _TELL], capture_output=True, text=True, check=False)
        if run.returncode == 0:
            break
    else:
        return Resident()
    found = Resident(*(int(word) << 10 for word in run.stdout.split()[-2:]))
    with suppress(OSError):
        kept.write_text(json.dumps(asdict(found)))
    return found


# What torch's CPU allocator takes from the system for a large tensor. Wheels for x86 use `posix_memalign`, which maps
# large blocks directly. Those for ARM use mimalloc, which places them in segments and requests huge pages. The layout
# was found by filling tensors of many sizes (tests/virtual/test_process_memory.py).

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGE = 2 * MIB
_SEGMENT = 32 * MIB
_SLOT = MIB // 2
_BEFORE = 64 * KIB  # a segment's header


@cache
def takes_huge_pages(torch_root: Path) -> bool:
    """Whether this torch allocates with mimalloc, on a system that gives it huge pages."""
    library = torch_root / "lib" / "libc10.so"
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text() or not library.exists():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(b"mimalloc_") >= 0


def footprint_bytes(size: int) -> int:
    """Return the bytes of a large tensor under mimalloc: its share of the huge pages of a segment full of such tensors."""
    slot = _rounded(size + 1, _SLOT)
    held = max((_SEGMENT - _BEFORE) // slot, 1)
    return _rounded(_BEFORE + (held - 1) * slot + size, _HUGE_PAGE) // held


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit

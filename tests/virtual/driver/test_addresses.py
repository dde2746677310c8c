"""Addresses of the virtual card are never those of the host: nothing is mapped there, so the host could be given the same."""

import ctypes
import shutil
from pathlib import Path

import pytest

from tonnage.virtual.driver.build import CORE, library_folder

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
TIB = 1 << 40


def test_the_host_maps_nothing_within_a_tebibyte_of_the_card() -> None:
    core = ctypes.CDLL(str(library_folder(13) / CORE))
    core.tn_reserve_addresses.restype = ctypes.c_uint64
    core.tn_reserve_addresses.argtypes = [ctypes.c_int64]
    sizes = [2 << 20, 157 << 30, 157 << 30]  # what torch reserves of an H200 for segments that expand
    starts = [core.tn_reserve_addresses(size) for size in sizes]
    low, high = min(starts) - TIB, max(start + size for start, size in zip(starts, sizes, strict=True)) + TIB
    rows = Path("/proc/self/maps").read_text().splitlines()
    mapped = [[int(end, 16) for end in row.split()[0].split("-")] for row in rows]
    assert mapped and not [each for each in mapped if each[0] < high and each[1] > low]

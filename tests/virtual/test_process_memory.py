"""The footprint of large tensors under mimalloc, as it was seen on torch 2.13 for ARM with huge pages."""

import pytest

from tonnage.units import MIB
from tonnage.virtual.process_memory import footprint_bytes, takes_huge_pages

# MiB of a tensor, and MiB that each of many such tensors, once filled, took
SEEN = [
    (1, 1.52), (1.2, 1.52), (3, 3.54), (4.5, 4.97), (9, 9.94), (12, 12.94), (16, 18.0), (17, 18.0), (24, 26.0), (25, 26.0),
    (40, 42.0), (100, 102.0), (187.5, 188.0), (1000, 1002.0),
]  # fmt: skip


@pytest.mark.parametrize(("size", "took"), SEEN)
def test_a_tensor_takes_what_was_seen(size, took):
    assert footprint_bytes(int(size * MIB)) / MIB == pytest.approx(took, rel=0.015)


def test_a_torch_without_mimalloc_takes_what_it_asks_for(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10.so").write_bytes(b"posix_memalign")
    assert not takes_huge_pages(tmp_path)

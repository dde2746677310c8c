"""Extents of a file without a name."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.fit.moving.disk import DiskProblem, DiskSpace
from tonnage.fit.moving.host import ALIGNMENT_BYTES
from tonnage.units import KIB

CPU = torch.device("cpu")


def space_in(directory: Path, staging_bytes: int = 64 * KIB) -> DiskSpace:
    return DiskSpace(directory, CPU, staging_bytes=staging_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=12), staging_bytes=st.integers(1, 100_000))
def test_what_was_stored_last_is_what_is_loaded(tmp_path: Path, sizes: list[int], staging_bytes: int) -> None:
    space = space_in(tmp_path, staging_bytes)
    extents = [space.take(size) for size in sizes]
    for version in (1, 2):
        for index, extent in enumerate(extents):
            values = torch.full((extent.byte_count,), (index * 2 + version) % 251, dtype=torch.uint8)
            space.store(values, extent)
    for index, extent in reversed(list(enumerate(extents))):
        found = torch.empty(extent.byte_count, dtype=torch.uint8)
        space.load(extent, found).wait()
        assert (found == (index * 2 + 2) % 251).all()
        assert torch.equal(space.read_all(extent), found)
    space.close()


def test_extents_are_used_again_and_leave_no_file(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    first = space.take(5000)
    assert space.file_bytes == 2 * ALIGNMENT_BYTES
    space.give(first)
    assert space.take(5000) == first
    assert list(tmp_path.iterdir()) == []
    space.close()


def test_a_part_of_an_extent_can_be_written(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    extent = space.take(2 * ALIGNMENT_BYTES)
    space.store(torch.ones(2 * ALIGNMENT_BYTES, dtype=torch.uint8), extent)
    space.store(torch.full((100,), 7, dtype=torch.uint8), extent, start=ALIGNMENT_BYTES)
    found = space.read_all(extent)
    assert (found[:ALIGNMENT_BYTES] == 1).all()
    assert (found[ALIGNMENT_BYTES : ALIGNMENT_BYTES + 100] == 7).all()
    space.close()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    space = space_in(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskProblem, match=r"8\.00 KiB more are needed .* full"):
        space.take(5000)
    assert space.file_bytes == 0
    space.close()


def test_a_write_that_failed_is_raised_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    space = space_in(tmp_path)
    extent = space.take(100)
    monkeypatch.setattr(os, "pwritev", broken)
    space.store(torch.ones(100, dtype=torch.uint8), extent)
    for _ in range(40):  # more than the staging would hold, were it not given back
        with pytest.raises(OSError, match="Input/output"):
            space.load(extent, torch.empty(100, dtype=torch.uint8)).wait()
    space.close()


def test_a_file_system_without_direct_access_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fcntl = fcntl.fcntl

    def refuse(file: Any, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain_fcntl(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    space = space_in(tmp_path)
    extent = space.take(10)
    space.store(torch.arange(10, dtype=torch.uint8), extent)
    assert space.read_all(extent).tolist() == list(range(10))
    space.close()


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(DiskProblem, match="No file can be made"):
        space_in(tmp_path / "nothing")

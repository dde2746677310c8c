"""Segments and their holes, against the snapshots that say them; ranges of addresses, against a set of them."""

import gzip
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots import DATA, Program, read_dict
from tonnage.recording.holes import Hole, Ranges, segments_at
from tonnage.recording.snapshot import read_snapshot
from tonnage.units import MIB

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 12)), max_size=40)


@given(steps)
def test_ranges_are_a_set_of_addresses(steps: list[tuple[bool, int, int]]) -> None:
    ranges, addresses = Ranges(), set()
    for adds, low, length in steps:
        span = set(range(low, low + length))
        addresses = addresses | span if adds else addresses - span
        (ranges.add if adds else ranges.remove)(low, low + length)
    assert {address for low, high in ranges.pairs() for address in range(low, high)} == addresses
    ends = [end for pair in ranges.pairs() for end in pair]
    assert ends == sorted(set(ends))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.gz")), ids=lambda path: path.name)
def test_holes_at_the_end_are_the_snapshot_s_free_blocks(path: Path) -> None:
    segments = pickle.loads(gzip.decompress(path.read_bytes()))["segments"]
    expected = {
        (segment["address"], segment["total_size"]): [
            Hole(block["address"], block["size"]) for block in segment["blocks"] if block["state"] == "inactive"
        ]
        for segment in segments
    }
    found = segments_at(read_snapshot(path))
    assert {(s.address, s.size_bytes): list(s.holes) for s in found} == expected


def test_a_fragmented_run_has_no_hole_for_the_request_that_killed_it() -> None:
    recording = read_snapshot(DATA / "fragmented.pickle.gz")
    levels = zip(recording.timeline.allocated_bytes, recording.timeline.reserved_bytes, strict=True)
    then = (recording.oom.allocated_bytes, recording.oom.reserved_bytes)
    segments = segments_at(recording, max(moment for moment, level in enumerate(levels) if level == then))
    assert sum(segment.unused_bytes for segment in segments) > 2 * recording.oom.requested_bytes
    assert max(segment.largest_hole_bytes for segment in segments) < recording.oom.requested_bytes


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_holes_and_blocks_fill_what_is_reserved(settings: str) -> None:
    program = Program(settings)
    blocks = [program.alloc(size * MIB) for size in (3, 30, 5, 2, 70)]
    for block in blocks[::2]:
        program.free(block)
    recording = read_dict(program.snapshot())
    for moment, (allocated, reserved) in enumerate(
        zip(recording.timeline.allocated_bytes, recording.timeline.reserved_bytes, strict=True)
    ):
        segments = segments_at(recording, moment)
        assert sum(segment.size_bytes for segment in segments) == reserved
        assert sum(segment.unused_bytes for segment in segments) == reserved - allocated

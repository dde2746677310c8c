"""Blocks and holes fill what was reserved, at the moment worth looking at."""

import pytest

from snapshots import DATA
from support import MIB, Run, training_run
from tonnage.recording import Recording
from tonnage.recording.snapshot import read_snapshot
from tonnage.report.html.segments import memory_map, moment_of


def recordings() -> dict[str, Recording]:
    return {
        "fixed": training_run(),
        "expandable": training_run(settings="expandable_segments:True"),
        "died": training_run(gpu="t4", batch=64),
    } | {path.name: read_snapshot(path) for path in DATA.glob("*.gz")}


@pytest.mark.parametrize(("name", "recording"), recordings().items())
def test_blocks_and_holes_fill_the_segments(name: str, recording: Recording) -> None:
    moment = moment_of(recording)
    segments = memory_map(recording, moment)
    assert sum(segment.size_bytes for segment in segments) == recording.timeline.reserved_bytes[moment]
    blocks = sum(block.block_bytes for segment in segments for block in segment.blocks)
    assert blocks == recording.timeline.allocated_bytes[moment]
    assert all(
        segment.unused_bytes + sum(block.block_bytes for block in segment.blocks) == segment.size_bytes
        for segment in segments
    )
    sizes = [segment.size_bytes for segment in segments]
    assert sizes == sorted(sizes, reverse=True)


def test_the_holes_of_a_run_that_worked_are_the_report_s_unused_bytes() -> None:
    recording = training_run()
    segments = memory_map(recording, moment_of(recording))
    assert sum(segment.unused_bytes for segment in segments) == recording.unused_at_peak_bytes


def test_a_run_that_died_is_shown_as_it_died() -> None:
    recording = read_snapshot(DATA / "fragmented.pickle.gz")
    segments = memory_map(recording, moment_of(recording))
    assert sum(segment.size_bytes for segment in segments) == recording.oom.reserved_bytes
    assert max(segment.state.largest_hole_bytes for segment in segments) < recording.oom.requested_bytes


def test_segments_know_their_stream() -> None:
    run = Run()
    run.alloc(30 * MIB, stream=7)
    run.alloc(50 * MIB, stream=0)
    assert [segment.stream for segment in memory_map(run.recording, moment_of(run.recording))] == [0, 7]


def test_a_run_without_segments() -> None:
    recording = Run().recording
    assert memory_map(recording, moment_of(recording)) == []

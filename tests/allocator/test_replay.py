"""Traces of a real GPU through the model: every block, every segment, to the byte."""

import gzip
import json
from pathlib import Path

import pytest

from tonnage.allocator.adopt import LiveBlock, Segment, State
from tonnage.allocator.replay import read_trace, replay
from tonnage.errors import BadTrace
from tonnage.recording.replay import outcome_on
from tonnage.recording.snapshot import read_traced

MIB = 2**20
DATA = Path(__file__).parent / "data"
TRUTH = Path(__file__).parents[3] / "shared" / "truth"

# Peaks of allocated and of reserved bytes, as torch.cuda.memory_stats() gave them on the H200.
PEAKS = {
    "default-mlp_train-32.json.gz": (6_578_867_200, 6_715_080_704),
    "default-vision_train-21.json.gz": (5_907_519_488, 7_048_527_872),
    "expandable-nano_gpt-2.json.gz": (21_568_562_688, 25_614_614_528),
    "sharded-dev-1.json.gz": (1_541_722_624, 2_428_502_016),
}


def truth_rows() -> dict[str, tuple[int, int]]:
    """The traces that lie beside the repository, with their measured peaks."""
    rows = {}
    for path in sorted(TRUTH.glob("h200*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            name, measured = row.get("trace") or row.get("trace_of_rank_0"), row.get("ranks", [row])[0]
            if name:
                rows[name] = (measured["allocated_bytes.all.peak"], measured["reserved_bytes.all.peak"])
    return rows


def check_exact(path: Path, peaks: tuple[int, int]) -> None:
    events = read_trace(path)
    result = replay(events)
    assert result.differences == []
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == peaks
    given = [tuple(event[1:]) for event in events if event[0] in ("segment_alloc", "segment_map")]
    assert [(s.address, s.size_bytes, s.stream) for s in result.segments] == given
    assert result.at_peak_allocated.allocated_bytes == peaks[0]
    assert result.at_peak_reserved.reserved_bytes == peaks[1]


@pytest.mark.parametrize("name", PEAKS)
def test_recorded_traces_are_exact(name: str) -> None:
    check_exact(DATA / name, PEAKS[name])


@pytest.mark.truth
@pytest.mark.parametrize(("name", "peaks"), truth_rows().items())
def test_all_traces_are_exact(name: str, peaks: tuple[int, int]) -> None:
    check_exact(TRUTH / "traces" / name, peaks)


@pytest.mark.parametrize("name", PEAKS)
def test_addresses_of_our_own_give_the_same_peaks(name: str) -> None:
    recording = read_traced(DATA / name).recording
    assert (recording.peak_allocated_bytes, outcome_on(recording).peak_reserved_bytes) == PEAKS[name]


@pytest.mark.truth
@pytest.mark.skipif(not TRUTH.exists(), reason="the measured traces are not beside the repository")
def test_what_expandable_segments_would_do_is_what_they_did() -> None:
    """One training run was traced twice, once in either mode."""
    default = read_traced(TRUTH / "traces" / "default-lm_train-4.json.gz")
    expandable = read_traced(TRUTH / "traces" / "expandable-lm_train-0.json.gz")
    predicted = outcome_on(default.recording, settings="expandable_segments:True")
    assert predicted.peak_reserved_bytes == replay(expandable.events).peak_reserved_bytes
    predicted = outcome_on(expandable.recording, settings="")
    assert predicted.peak_reserved_bytes == replay(default.events).peak_reserved_bytes


def events_of_a_small_run() -> list[tuple[str, int, int, int]]:
    return [
        ("segment_alloc", 100 * MIB, 20 * MIB, 0),
        ("alloc", 100 * MIB, 5 * MIB, 0),
        ("segment_alloc", 200 * MIB, 30 * MIB, 4),
        ("alloc", 200 * MIB, 30 * MIB, 4),
        ("free_requested", 200 * MIB, 30 * MIB, 4),
        ("free_completed", 200 * MIB, 30 * MIB, 4),
        ("segment_free", 200 * MIB, 30 * MIB, 4),
        ("oom", 7 * MIB, 900 * MIB, 0),
    ]


def test_a_segment_given_back() -> None:
    result = replay(events_of_a_small_run())
    assert result.differences == []
    assert (result.allocations, result.ooms) == (2, 1)
    assert result.stats["reserved_bytes.all.current"] == 20 * MIB
    assert result.at_peak_reserved.unused_bytes == 15 * MIB
    figures = result.as_json()
    assert figures["exact"] is True
    assert figures["fragmentation"]["at_peak_reserved"]["unused_bytes"] == 15 * MIB
    assert json.loads(json.dumps(figures)) == figures


def test_pages_given_back() -> None:
    result = replay(
        [
            ("segment_map", 100 * MIB, 60 * MIB, 0),
            ("alloc", 100 * MIB, 50 * MIB, 0),
            ("free_requested", 100 * MIB, 50 * MIB, 0),
            ("free_completed", 100 * MIB, 50 * MIB, 0),
            ("segment_unmap", 100 * MIB, 60 * MIB, 0),
        ]
    )
    assert result.differences == []
    assert result.stats["reserved_bytes.all.current"] == 0


@pytest.mark.parametrize(
    ("place", "event", "words"),
    [
        (0, ("segment_alloc", 100 * MIB, 22 * MIB, 0), "the model has segment_alloc of 20971520 B"),
        (1, ("alloc", 101 * MIB, 5 * MIB, 0), "lie at 0x6400000 in the model, at 0x6500000 in the trace"),
        (6, ("segment_free", 100 * MIB, 20 * MIB, 0), "in use or unknown in the model"),
        (7, ("segment_alloc", 300 * MIB, 2 * MIB, 0), "which the model never needed"),
    ],
)
def test_differences_are_found(place: int, event: tuple[str, int, int, int], words: str) -> None:
    events = events_of_a_small_run()
    events[place] = event
    differences = replay(events).differences
    assert any(words in difference.words for difference in differences), differences


def test_a_trace_that_begins_in_mid_run() -> None:
    events = [("free_requested", 5 * MIB, 512, 0), ("free_completed", 5 * MIB, 512, 0), *events_of_a_small_run()]
    result = replay(events)
    assert (result.unknown_frees, result.differences) == (1, [])


def test_a_trace_that_begins_with_a_state() -> None:
    """Blocks of before are freed, and what is free between them is used, as the allocator would."""
    segment = Segment(100 * MIB, 20 * MIB, 0, False)
    blocks = [LiveBlock(100 * MIB, 5 * MIB, 5 * MIB, 0), LiveBlock(110 * MIB, 10 * MIB, 10 * MIB, 0)]
    events = [
        ("alloc", 105 * MIB, 5 * MIB, 0),
        ("free_requested", 100 * MIB, 5 * MIB, 0),
        ("free_completed", 100 * MIB, 5 * MIB, 0),
        ("alloc", 100 * MIB, 3 * MIB, 0),
    ]
    result = replay(events, start=State([segment], blocks))
    assert result.differences == []
    assert (result.older_blocks, result.older_bytes, result.unknown_frees) == (2, 15 * MIB, 0)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (20 * MIB, 20 * MIB)


def test_a_trace_that_contradicts_itself_is_replayed_to_its_end() -> None:
    """Frees twice, frees that are only completed, blocks on top of others, and segments that overlap."""
    events = [
        ("segment_alloc", 100 * MIB, 20 * MIB, 0),
        ("alloc", 100 * MIB, 5 * MIB, 0),
        ("alloc", 100 * MIB, 5 * MIB, 0),
        ("free_completed", 100 * MIB, 5 * MIB, 0),
        ("free_requested", 100 * MIB, 5 * MIB, 0),
        ("alloc", 500 * MIB, 60 * MIB, 0),
        ("segment_alloc", 100 * MIB, 60 * MIB, 0),
        ("alloc", 100 * MIB, 60 * MIB, 0),
        ("segment_free", 7, 60 * MIB, 0),
        ("free_requested", 100 * MIB, 60 * MIB, 0),
        ("free_completed", 100 * MIB, 60 * MIB, 0),
        ("free_requested", 500 * MIB, 60 * MIB, 0),
        ("free_completed", 500 * MIB, 60 * MIB, 0),
    ]
    result = replay(events)
    assert result.differences
    assert (result.lost_frees, result.unknown_frees) == (1, 1)
    assert result.stats["allocated_bytes.all.current"] == 0


def test_requests_beyond_any_gpu_are_refused() -> None:
    with pytest.raises(BadTrace, match="beyond any GPU"):
        replay([("alloc", 512, 2**46, 0)])


def test_a_trace_without_segments_is_still_replayed() -> None:
    result = replay([event for event in events_of_a_small_run() if event[0] != "segment_alloc"])
    assert result.peak_allocated_bytes == 35 * MIB
    assert result.differences


def test_plain_json_is_read_as_well(tmp_path: Path) -> None:
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(json.dumps(events_of_a_small_run()))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed) == events_of_a_small_run()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no trace"),
        (b"{}}", "holds no trace"),
        (b"[1, 2]", "holds no trace"),
        (b'[["alloc", 1, 2]]', "holds no trace"),
        (b'[["alloc", "x", 2, 3]]', "holds no trace"),
        (b"\x1f\x8bnonsense", "holds no trace"),
        (b"\xff\xfe", "holds no trace"),
        (b"[" * 200_000, "nested too deeply"),
        (b'[["alloc", 1, Infinity, 3]]', "event 0 is"),
        (b'[["alloc", 1, 1e999, 3]]', "event 0 is"),
        (b'[["alloc", 1, %d, 3]]' % 2**63, "event 0 is"),
        (b'[["free_requested", 1, 1, 0], ["alloc", 1, null, 0]]', "event 1 is"),
        (gzip.compress(b'[["alloc", 1, 2, 3]]')[:-12] + bytes(12), "is damaged"),
        (b'[["lunch", 1, 2, 3]]', "event 0 is ..lunch"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=words):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "more",
    [
        [("free_completed", 2**21, 512, 0)],
        [("free_requested", 2**21, 512, 0), ("free_requested", 2**21, 512, 0)],
        [("segment_alloc", 2**21, 2**21, 0), ("alloc", 2**21, 2**20, 0), ("free_requested", 2**21, 2**20, 0)] * 2,
        [("alloc", 2**21, 512, 0), ("free_requested", 2**21, 512, 0), ("free_completed", 2**21, 512, 0)] * 2,
    ],
)
def test_a_trace_that_contradicts_itself_is_replayed_all_the_same(more: list[tuple[str, int, int, int]]) -> None:
    events = [("segment_alloc", 2**21, 2**21, 0), ("alloc", 2**21, 512, 0), *more]
    assert replay(events).events == len(events)


def test_of_moments_with_as_much_reserved_the_fullest_is_told() -> None:
    """A trace that begins with a cache would else be said to use nothing of it."""
    start = State([Segment(1 << 40, 40 * MIB, 0, False)], [])
    result = replay([("alloc", 1 << 40, 30 * MIB, 0), ("free_completed", 1 << 40, 30 * MIB, 0)], start=start)
    assert result.at_peak_reserved.allocated_bytes == 30 * MIB

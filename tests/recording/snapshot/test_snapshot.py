"""A snapshot says as a recording what its events say, to the byte: on real ones, and from any point of a run on."""

import gzip
import io
import pickle
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots import (
    BACKWARD,
    DATA,
    FORWARD,
    INIT,
    MAIN,
    MODULE,
    MOVE,
    TORCH,
    UPDATE,
    Program,
    frame,
    read_dict,
    small_snapshot,
)
from tonnage.allocator.replay import replay
from tonnage.explain import diagnose
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.recording.snapshot import SnapshotLimits, Stream, load, read_snapshot, read_traced, snapshot_of, traced_of
from tonnage.units import MIB

REAL = sorted(path.name.removesuffix(".pickle.gz") for path in DATA.glob("*.gz"))


def raw(name: str) -> dict[str, Any]:
    """These were made here: the standard library may read them, and is the second opinion."""
    return pickle.loads(gzip.decompress((DATA / f"{name}.pickle.gz").read_bytes()))


def recorded(name: str) -> Recording:
    return read_snapshot(DATA / f"{name}.pickle.gz")


def requested_levels(trace: list[dict[str, Any]]) -> Iterator[int]:
    signs = {"alloc": 1, "free_requested": -1}
    return accumulate(signs.get(event["action"], 0) * event["size"] for event in trace)


@pytest.mark.parametrize("name", REAL)
def test_peaks_and_fragmentation_are_the_allocator_s_own(name: str) -> None:
    recording = recorded(name)
    trace = raw(name)["device_traces"][0]
    result = replay([(e["action"], e.get("addr", 0), e["size"], e["stream"]) for e in trace])
    assert result.differences == []
    assert recording.peak_allocated_bytes == result.peak_allocated_bytes
    assert recording.peak_reserved_bytes == result.peak_reserved_bytes
    reserved = recording.timeline.reserved_bytes[recording.timeline.peak_sequence]
    assert reserved - recording.peak_allocated_bytes == result.at_peak_allocated.unused_bytes


@pytest.mark.parametrize("name", REAL)
def test_requests_are_a_plain_sum_of_the_events(name: str) -> None:
    recording = recorded(name)
    changes = [0] * len(recording.timeline.allocated_bytes)
    for a in recording.allocations:
        changes[a.born] += a.requested_bytes
        if a.died is not None:
            changes[a.died] -= a.requested_bytes
    assert max(accumulate(changes)) == max(requested_levels(raw(name)["device_traces"][0]))


@pytest.mark.parametrize("name", REAL)
def test_what_is_live_at_the_end_is_what_the_segments_hold(name: str) -> None:
    recording, segments = recorded(name), raw(name)["segments"]
    live = {(a.address, a.block_bytes, a.requested_bytes) for a in recording.allocations if a.died is None}
    held = {
        (block["address"], block["size"], block["requested_size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live == held
    assert recording.timeline.allocated_bytes[-1] == sum(segment["allocated_size"] for segment in segments)
    assert recording.timeline.reserved_bytes[-1] == sum(segment["total_size"] for segment in segments)


def test_the_figures_of_the_real_ones() -> None:
    normal, oom, fragmented = recorded("normal"), recorded("oom"), recorded("fragmented")
    assert (normal.peak_allocated_bytes, normal.peak_reserved_bytes) == (7_507_195_392, 10_412_359_680)
    assert (oom.peak_allocated_bytes, oom.peak_reserved_bytes) == (29_026_451_968, 29_026_680_832)
    assert (fragmented.peak_allocated_bytes, fragmented.peak_reserved_bytes) == (4_454_568_960, 5_987_368_960)
    assert [r.header.outcome for r in (normal, oom, fragmented)] == ["ok", "oom", "oom"]


def test_the_ledger_of_the_normal_run_is_the_model_s() -> None:
    recording = recorded("normal")
    sizes = recording.ledger()
    elements = sum(a.requested_bytes for a in recording.allocations if a.category is Category.PARAMETERS)
    # nano_gpt.py with four layers: embeddings of tokens and places, head, blocks, norms; four bytes each.
    block = 4 * 1024 + 4 * 1024**2 + 8 * 1024**2 + 5 * 1024
    assert elements == 4 * (2 * 50304 * 1024 + 1024**2 + 2 * 1024 + 4 * block)
    assert 2 * elements <= sizes[Category.OPTIMIZER_STATES] <= 2 * sizes[Category.PARAMETERS] + 512 * 200
    gradients = [a for a in recording.allocations if a.category is Category.GRADIENTS and a.step == 2]
    assert sum(a.requested_bytes for a in gradients) == elements
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3, 4]


def test_the_requests_that_failed_have_their_lines() -> None:
    oom, fragmented = recorded("oom").oom, recorded("fragmented").oom
    assert oom is not None
    assert fragmented is not None
    assert (oom.line, oom.requested_bytes, oom.phase) == ("mlp_train.py:35", 2**30, "forward")
    assert oom.reserved_bytes - oom.allocated_bytes < MIB
    assert (fragmented.line, fragmented.requested_bytes, fragmented.phase) == (
        "fragment.py:13",
        1_105_985_536,
        "backward",
    )
    assert fragmented.reserved_bytes - fragmented.allocated_bytes > 2 * fragmented.requested_bytes


# A program: sizes to allocate or, where negative, which of the living blocks to free.
sizes = st.one_of(st.integers(1, 4000), st.integers(1, 40 * MIB), st.sampled_from((3 * MIB, 10 * MIB, 21 * MIB + 512)))
programs = st.lists(st.one_of(sizes, st.integers(-20, -1), st.just(0)), min_size=1, max_size=80)


def run(program: list[int], settings: str) -> Program:
    running, living = Program(settings), []
    for number in program:
        if number > 0:
            living.append(running.alloc(number))
        elif number == 0:
            running.allocator.empty_cache()
        elif living:
            running.free(living.pop(number % len(living)))
    return running


@pytest.mark.parametrize(
    "settings", ["", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:25"]
)
@given(program=programs, choice=st.integers(0, 10**6))
def test_the_tail_of_a_trace_has_the_levels_of_the_whole(settings: str, program: list[int], choice: int) -> None:
    running = run(program, settings)
    whole = read_dict(running.snapshot())
    assert whole.peak_allocated_bytes == running.allocator.memory_stats()["allocated_bytes.all.peak"]
    assert whole.peak_reserved_bytes == running.allocator.memory_stats()["reserved_bytes.all.peak"]
    first = choice % (len(running.trace) + 1)
    while first < len(running.trace) and running.trace[first]["action"] == "free_completed":
        first += 1  # in between, a block is neither here nor there
    tail = read_dict(running.snapshot(first))
    events = sum(event["action"] != "free_completed" for event in running.trace[first:])
    if events:
        assert tail.timeline.allocated_bytes[-events:] == whole.timeline.allocated_bytes[-events:]
        assert tail.timeline.reserved_bytes[-events:] == whole.timeline.reserved_bytes[-events:]


def test_any_tail_of_a_real_trace_replays_to_the_same_end() -> None:
    """From wherever the recording began: no crash, no block that the events contradict, and the same explanation."""
    whole = raw("fragmented")
    trace = whole["device_traces"][0]
    for first in range(0, len(trace), 1193):
        whole["device_traces"] = [trace[first:]]
        traced = traced_of(snapshot_of(load(as_stream(whole), SnapshotLimits()), SnapshotLimits()))
        result = replay(traced.events, traced.settings, traced.start)
        assert result.differences == [], first
        assert result.unknown_frees == 0
        diagnosis = diagnose(traced.recording)
        assert not any(finding.rule == "resident-data" for finding in diagnosis.evidence)
        assert diagnosis.larger_card is None


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:25"])
@given(program=programs, choice=st.integers(0, 10**6))
def test_any_tail_of_a_trace_is_replayed_and_explained(settings: str, program: list[int], choice: int) -> None:
    running = run(program, settings)
    first = choice % (len(running.trace) + 1)
    snapshot = snapshot_of(load(as_stream(running.snapshot(first)), SnapshotLimits()), SnapshotLimits())
    traced = traced_of(snapshot)
    result = replay(traced.events, traced.settings, traced.start)
    stats = running.allocator.memory_stats()
    assert result.stats["allocated_bytes.all.current"] == stats["allocated_bytes.all.current"]
    assert diagnose(traced.recording).cause in ("none", "fragmentation")
    assert all(
        allocated <= reserved
        for allocated, reserved in zip(
            traced.recording.timeline.allocated_bytes[traced.recording.begins_at :],
            traced.recording.timeline.reserved_bytes[traced.recording.begins_at :],
            strict=True,
        )
    )


def as_stream(snapshot: dict[str, Any]) -> Stream:
    return Stream(io.BytesIO(pickle.dumps(snapshot)), SnapshotLimits())


def test_blocks_from_before_the_trace_are_counted_and_said() -> None:
    program = Program()
    program.alloc(30 * MIB, MOVE)
    early = program.alloc(2 * MIB, FORWARD)
    first = len(program.trace)
    program.free(early, [MAIN])
    program.alloc(4 * MIB, FORWARD)
    recording = read_dict(program.snapshot(first))
    assert recording.timeline.allocated_bytes[-1] == 34 * MIB
    assert recording.peak_allocated_bytes == 34 * MIB
    assert recording.ledger()[Category.PARAMETERS] == 30 * MIB
    assert recording.notes[0].text == "2 blocks (32.00 MiB) are older than the first event"


def test_a_segment_that_came_and_went_was_not_there_before_though_the_end_has_it() -> None:
    program = Program()
    program.free(program.alloc(32 * MIB))
    program.allocator.empty_cache()
    known = len(program.trace)
    program.alloc(32 * MIB)
    snapshot = program.snapshot()
    del snapshot["device_traces"][0][known:]  # recording stopped before it came again
    recording = read_dict(snapshot)
    assert recording.peak_reserved_bytes == 32 * MIB
    assert recording.timeline.reserved_bytes == [32 * MIB] * 3 + [0]


def test_a_snapshot_without_events_is_what_it_holds() -> None:
    program = Program()
    program.alloc(30 * MIB, MOVE)
    snapshot = program.snapshot()
    snapshot["device_traces"] = [[], []]
    recording = read_dict(snapshot)
    assert recording.peak_allocated_bytes == 30 * MIB
    assert recording.peak_allocation.line == "train.py:88"


def test_a_training_step_has_its_phases_and_categories() -> None:
    program = Program()
    program.alloc(8 * MIB, MOVE)
    for step in (1, 2):
        activation = program.alloc(5 * MIB, FORWARD)
        program.free(program.alloc(512, BACKWARD))
        gradient = program.alloc(8 * MIB)
        passing = program.alloc(6 * MIB)
        program.free(activation)
        program.free(passing)
        if step == 1:
            program.alloc(8 * MIB, INIT)
        program.free(program.alloc(8 * MIB, UPDATE), UPDATE)
        program.free(gradient, [MAIN])
    recording = read_dict(program.snapshot())
    found = [(a.category, a.phase, a.step) for a in recording.allocations if a.requested_bytes > MIB]
    one_step = [
        (Category.ACTIVATIONS, "forward"),
        (Category.GRADIENTS, "backward"),
        (Category.ACTIVATIONS, "backward"),
        (Category.OPTIMIZER_STATES, "optimizer"),
        (Category.WORKSPACE, "optimizer"),
    ]
    again = [pair for pair in one_step if pair[0] is not Category.OPTIMIZER_STATES]
    expected = [(*pair, 1) for pair in one_step] + [(*pair, 2) for pair in again]
    assert found == [(Category.PARAMETERS, "setup", 0), *expected]
    assert {a.line for a in recording.allocations} == {"train.py:88"}


def test_frees_without_stacks_are_no_backward() -> None:
    """As `_record_memory_history(context="alloc")` writes them."""
    program = Program()
    program.alloc(8 * MIB, MOVE)
    for _ in range(2):
        program.free(program.alloc(5 * MIB, FORWARD))
    recording = read_dict(program.snapshot())
    assert [(mark.kind, mark.name) for mark in recording.marks] == [("step", "1"), ("phase", "forward")]


def test_a_request_that_was_caught_did_not_end_the_run() -> None:
    program = Program()
    program.alloc(8 * MIB, MOVE)
    failure = {"action": "oom", "device_free": MIB, "size": 2**40, "stream": 0, "time_us": 9, "frames": FORWARD}
    program.trace.append(failure)
    died = read_dict(program.snapshot())
    assert died.header.outcome == "oom"
    assert died.oom.free_bytes == MIB
    assert died.header.capacity_bytes == died.peak_reserved_bytes + MIB
    program.alloc(8 * MIB, FORWARD)
    went_on = read_dict(program.snapshot())
    assert (went_on.header.outcome, went_on.oom, went_on.header.ooms_caught) == ("ok", None, 1)


def test_streams_that_still_use_a_block_keep_its_place() -> None:
    """After its free is requested a block is not allocated, but the next one may not lie in it."""
    snapshot = small_snapshot()
    trace = snapshot["device_traces"][0]
    kept = trace[1]
    waiting = [e for e in trace if e["action"].startswith("free")]
    assert waiting[0]["addr"] == waiting[1]["addr"] != kept["addr"]
    trace.remove(waiting[1])
    recording = read_dict(snapshot)
    assert recording.timeline.allocated_bytes[-1] == 6 * MIB


def test_of_several_devices_the_busiest_is_read_or_the_one_asked_for(tmp_path) -> None:
    one, two = Program(), Program()
    one.alloc(3 * MIB)
    for size in (4 * MIB, 5 * MIB):
        two.alloc(size)
    first, second = one.snapshot(), two.snapshot()
    for segment in second["segments"]:
        segment["device"] = 1
    first["segments"] += second["segments"]
    first["device_traces"] += second["device_traces"]
    (tmp_path / "two").write_bytes(pickle.dumps(first))
    busiest = read_snapshot(tmp_path / "two")
    assert busiest.peak_allocated_bytes == 9 * MIB
    assert busiest.notes[0].operator == "device 1"
    assert read_snapshot(tmp_path / "two", device=0).peak_allocated_bytes == 3 * MIB


def test_words_of_a_snapshot_cannot_steer_a_terminal() -> None:
    program = Program()
    program.alloc(3 * MIB, [frame("f", "/home/\x1b[2J/train\x07.py", 3)])
    assert read_dict(program.snapshot()).allocations[0].line == "train?.py:3"


def test_actions_of_other_versions_are_counted_not_guessed() -> None:
    program = Program()
    program.alloc(3 * MIB)
    program.trace.append({"action": "teleport", "addr": 1, "size": 1, "stream": 0})
    program.trace.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
    notes = read_dict(program.snapshot()).notes
    assert [(note.kind, note.operator, note.count) for note in notes] == [("not_modelled", "teleport", 1)]


def test_settings_are_the_snapshot_s() -> None:
    assert read_dict(run([MIB], "expandable_segments:True").snapshot()).header.settings == "expandable_segments:True"
    snapshot = run([MIB], "").snapshot()
    snapshot["allocator_settings"]["expandable_segments"] = True
    assert read_dict(snapshot).header.settings == "expandable_segments:True"
    expandable = run([MIB], "expandable_segments:True").snapshot()
    del expandable["allocator_settings"]
    assert read_dict(expandable).header.settings == "expandable_segments:True"


def test_events_go_through_the_allocator_as_a_trace_does() -> None:
    traced = read_traced(DATA / "fragmented.pickle.gz")
    assert len(traced.events) == len(raw("fragmented")["device_traces"][0])
    assert replay(traced.events, traced.settings, traced.start).differences == []


LAYER = [frame("forward", "/home/me/model.py", 22), frame("_call_impl", MODULE, 1790)]
PASS = [frame("forward", "/home/me/model.py", 50), frame("_call_impl", MODULE, 1790)]


def forward_of(program: Program, layers: int, caller: list[dict[str, Any]]) -> None:
    """One pass over layers, each of which keeps what backward would need."""
    for _ in range(layers):
        program.alloc(5 * MIB, [frame("forward", "/home/me/model.py", 20), LAYER[1], *PASS, *caller])
        program.alloc(7 * MIB, [*LAYER, *PASS, *caller])


def test_the_layers_of_one_forward_are_no_leak() -> None:
    program = Program()
    forward_of(program, 9, [MAIN])
    recording = read_dict(program.snapshot())
    assert [mark.name for mark in recording.marks if mark.kind == "step"] == ["1"]
    assert diagnose(recording).cause == "none"


def test_a_loop_of_the_script_s_own_over_forwards_is_one_of_steps() -> None:
    program = Program()
    for _ in range(6):
        program.free(program.alloc(3 * MIB, [frame("<module>", "/home/me/train.py", 80)]))
        forward_of(program, 3, [MAIN])
    recording = read_dict(program.snapshot())
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3, 4, 5, 6]
    assert diagnose(recording).cause == "leak"


def test_older_blocks_are_no_data_and_have_no_purpose_unless_gradients_say_so() -> None:
    program = Program()
    for _ in range(3):  # a parameter and Adam's states
        program.alloc(40 * MIB)
    program.alloc(9 * MIB)
    first = len(program.trace)
    program.free(program.alloc(5 * MIB, FORWARD))
    forward = read_dict(program.snapshot(first))
    assert forward.ledger()[Category.EARLIER] == 129 * MIB
    assert not any(finding.rule == "resident-data" for finding in diagnose(forward).evidence)
    program.free(program.alloc(512, BACKWARD))
    program.alloc(40 * MIB)
    program.free(program.alloc(40 * MIB, UPDATE), UPDATE)
    sizes = read_dict(program.snapshot(first)).ledger()
    assert sizes[Category.PARAMETERS] == sizes[Category.GRADIENTS] == 40 * MIB
    assert sizes[Category.OPTIMIZER_STATES] == 80 * MIB
    assert sizes[Category.EARLIER] == 9 * MIB


def test_what_was_reserved_before_is_neither_fragmentation_nor_saved() -> None:
    """It may be the cache of an older peak; the script empties it."""
    program = Program()
    program.alloc(30 * MIB, MOVE)
    for block in [program.alloc(50 * MIB) for _ in range(20)]:
        program.free(block)
    first = len(program.trace)
    program.frames = [frame("empty_cache", TORCH + "cuda/memory.py", 200), MAIN]
    program.allocator.empty_cache()
    program.free(program.alloc(20 * MIB, FORWARD))
    recording = read_dict(program.snapshot(first))
    assert recording.peak_reserved_bytes == 1030 * MIB
    assert recording.own_peak_reserved_bytes == 50 * MIB
    assert recording.unused_at_peak_bytes == 0
    assert [mark.kind for mark in recording.marks if mark.kind == "empty_cache"] == ["empty_cache"]
    assert diagnose(recording).cause == "none"
    assert not any("expandable" in fix.how for fix in diagnose(recording).fixes)


STEP = [frame("step", "/home/me/optimizer.py", 80), MAIN]


def step_with_new_states() -> Recording:
    """A step of an optimizer that computes its states anew and drops the older ones; the model is from before."""
    program = Program()
    weight, *states = [program.alloc(40 * MIB) for _ in range(3)]
    first = len(program.trace)
    program.free(program.alloc(5 * MIB, FORWARD))
    program.free(program.alloc(512, BACKWARD))
    program.alloc(weight.requested_bytes)
    for state in states:
        program.alloc(40 * MIB, STEP)
        program.free(state, STEP)
    return read_dict(program.snapshot(first))


def test_older_states_that_a_step_replaces_are_states() -> None:
    recording = step_with_new_states()
    kinds = [a.category for a in recording.allocations if a.requested_bytes == 40 * MIB]
    assert sorted(kinds[:3]) == [Category.OPTIMIZER_STATES, Category.OPTIMIZER_STATES, Category.PARAMETERS]
    assert kinds[3:] == [Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.OPTIMIZER_STATES]


def test_lines_are_those_of_what_the_sentence_is_about() -> None:
    """Not the line of backward, nor any where most of the states are older; and older blocks are told apart."""
    found = diagnose(step_with_new_states())
    assert found.sentence.endswith("optimizer states are 120.00 MiB of it.")
    rows = {row.what: row.size_bytes for row in found.evidence[0].lines if not row.line}
    assert rows == {"optimizer states": 80 * MIB, "parameters": 40 * MIB}


def test_the_script_is_the_one_that_was_started() -> None:
    program = Program()
    forward_of(program, 3, [MAIN, frame("run_path", "<frozen runpy>", 9), frame("<module>", "/home/me/launch.py", 3)])
    for _ in range(20):  # backward of a library's own function, on a thread that knows no script
        library = frame("backward", "/usr/lib/python3.12/site-packages/bnb/_functions.py", 9)
        program.free(program.alloc(MIB, [library, frame("apply", TORCH + "autograd/function.py", 307)]))
    assert read_dict(program.snapshot()).header.script == "train.py"


def test_a_graph_that_no_backward_uses_is_told() -> None:
    program = Program()
    for line in range(20, 25):
        program.alloc(5 * MIB, [frame("forward", "/home/me/model.py", line), *PASS[1:], MAIN])
    told = {finding.rule: finding.sentence for finding in diagnose(read_dict(program.snapshot())).evidence}
    assert told["graph-without-backward"].startswith("25.00 MiB of activations are kept as for a backward")
    program.free(program.alloc(512, BACKWARD))
    trained = diagnose(read_dict(program.snapshot())).evidence
    assert "graph-without-backward" not in {finding.rule for finding in trained}

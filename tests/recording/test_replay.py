import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import MIB, Run, training_run
from tonnage.allocator import OutOfMemory as AllocatorOutOfMemory
from tonnage.hardware import find_gpu
from tonnage.recording import Recording
from tonnage.recording.replay import demand, outcome_on, replay_on

programs = st.lists(st.one_of(st.integers(1, 60 * MIB), st.integers(-10, -1)), max_size=60)


def recorded(program: list[int]) -> Recording:
    run, living = Run(), []
    for number in program:
        if number > 0:
            living.append(run.alloc(number))
        elif number == -10:
            run.empty_cache()
        elif living:
            run.free(living.pop(number % len(living)))
    return run.recording


@given(programs)
def test_on_its_own_card_a_replay_changes_nothing(program: list[int]) -> None:
    recording = recorded(program)
    again = replay_on(recording)
    assert again.allocations == recording.allocations
    assert again.segments == recording.segments
    assert again.marks == recording.marks
    assert again.header == recording.header
    assert outcome_on(recording).peak_reserved_bytes == recording.peak_reserved_bytes


def test_marks_keep_their_place() -> None:
    recording = training_run()
    again = replay_on(recording)
    assert again.marks == recording.marks
    assert again.phases == recording.phases
    assert again.steps == recording.steps


def test_another_card_has_its_own_capacity_and_overhead() -> None:
    parts = {"context": 500 * MIB, "cublas": MIB, "cublas 2": MIB, "something else": 7}
    recording = training_run(overhead_bytes=sum(parts.values()), overhead_parts=parts)
    card = find_gpu("a100-80")
    header = replay_on(recording, card).header
    assert (header.gpu, header.gpu_name, header.capacity_bytes) == (card.key, card.name, card.memory_bytes)
    known = card.overheads["context"].size_bytes + 2 * card.overheads["cublas"].size_bytes
    assert header.overhead_bytes == known + 7
    assert recording.header.gpu == "h200"


def test_a_card_that_is_too_small_names_the_line_that_dies() -> None:
    recording = training_run(batch=32)
    small = replay_on(recording, find_gpu("t4"))
    assert recording.fits and not small.fits
    assert small.oom is not None
    assert small.oom.line == "train.py:88"
    assert small.oom.operator == "log_softmax"
    assert small.oom.free_bytes < small.oom.requested_bytes
    assert "Tried to allocate" in small.oom.message
    assert small.peak_allocated_bytes < recording.peak_allocated_bytes
    assert small.ledger().total_bytes == small.peak_allocated_bytes


def test_a_run_on_the_card_dies_where_the_replay_says() -> None:
    ran, replayed = training_run(batch=32, gpu="t4"), replay_on(training_run(batch=32), find_gpu("t4"))
    assert ran.oom is not None and replayed.oom is not None
    assert (ran.oom.requested_bytes, ran.oom.free_bytes) == (replayed.oom.requested_bytes, replayed.oom.free_bytes)
    assert ran.peak_reserved_bytes == replayed.peak_reserved_bytes
    assert ran.marks == replayed.marks


def test_the_request_that_failed_belongs_to_the_demand() -> None:
    died = training_run(batch=32, gpu="t4")
    assert died.oom is not None
    needed = demand(died)
    assert needed.allocations[-1].requested_bytes == died.oom.requested_bytes
    assert demand(needed) is needed
    assert outcome_on(died).failed is not None
    assert replay_on(died).header.outcome == "oom"
    assert outcome_on(died, find_gpu("h200")).failed is None
    assert replay_on(died, find_gpu("h200")).fits


def test_what_is_freed_after_the_end_was_there_at_the_end() -> None:
    run = Run("t4")
    blocks = [run.alloc(2**30) for _ in range(13)]
    with pytest.raises(AllocatorOutOfMemory) as caught:
        run.alloc(2 * 2**30)
    died = run.dies(caught.value, line="train.py:1")
    run.free(*blocks)
    assert len(demand(died).live_at_peak) == 14
    assert outcome_on(died).failed is not None
    assert outcome_on(died, find_gpu("v100-16")).failed is None


def test_a_script_that_failed_stays_failed() -> None:
    assert replay_on(training_run(outcome="error"), find_gpu("h100")).header.outcome == "error"


def test_settings_can_be_others() -> None:
    run = Run(capacity_bytes=200 * MIB)
    holes = [run.alloc(30 * MIB) for _ in range(6)]
    run.free(*holes[::2])
    recording = run.recording
    run.alloc(60 * MIB)
    assert recording.peak_reserved_bytes == 180 * MIB
    expandable = outcome_on(recording, settings="expandable_segments:True")
    assert expandable.failed is None


def test_an_emptied_cache_is_emptied_again() -> None:
    run = Run()
    run.free(run.alloc(100 * MIB))
    run.empty_cache()
    run.alloc(90 * MIB)
    assert replay_on(run.recording).peak_reserved_bytes == 100 * MIB == run.recording.peak_reserved_bytes

from dataclasses import replace
from pathlib import Path

import pytest

from support import gone_on, training_run
from tonnage.hardware import find_gpu
from tonnage.recording import Recording, read_recording, write_recording
from tonnage.recording.beyond import REPEATS, TO_ITS_END, ending_of, moment_of_failure, parted, until_failure
from tonnage.recording.replay import as_its_card_saw_it, demand, least_bytes, outcome_on, replay_on


@pytest.fixture
def recording() -> Recording:
    return gone_on(batch=96, layers=12)


def test_the_card_s_part_ends_before_the_request_that_failed(recording: Recording) -> None:
    assert recording.header.outcome == "oom" and recording.fits is False
    assert recording.oom and recording.oom.requested_bytes > recording.oom.free_bytes
    assert recording.peak_reserved_bytes <= recording.header.capacity_bytes
    assert recording.timeline.allocated_bytes[-1] == recording.oom.allocated_bytes
    assert recording.whole and recording.whole.peak_allocated_bytes > recording.peak_allocated_bytes
    assert not any(mark.kind == "beyond" for mark in recording.marks)


def test_what_it_held_beside_the_allocator_is_that_of_the_moment(recording: Recording) -> None:
    assert recording.oom and recording.whole
    late = replace(recording.oom, free_bytes=recording.oom.free_bytes + 100 * 2**20)  # cuBLAS was not in use yet
    again = parted(recording.whole, late, 40, TO_ITS_END)
    assert again.header.overhead_parts == {"context": 500 * 2**20}
    assert demand(again).header.overhead_bytes == 600 * 2**20


def test_all_that_it_needs_is_the_whole_run(recording: Recording) -> None:
    needed = demand(recording)
    assert recording.whole
    assert len(needed.allocations) == len(recording.whole.allocations) > len(recording.allocations) + 1
    assert needed.header.outcome == "oom"
    assert outcome_on(recording).failed and not outcome_on(recording, find_gpu("h200")).failed


def test_the_least_memory_is_enough_and_little_less_is_not(recording: Recording) -> None:
    least = least_bytes(recording)
    needed = demand(recording)
    needed.header = replace(needed.header, capacity_bytes=least)
    assert outcome_on(needed).failed is None
    needed.header = replace(needed.header, capacity_bytes=int(0.99 * least))
    assert outcome_on(needed).failed is not None


def test_a_file_keeps_both(recording: Recording, tmp_path: Path) -> None:
    assert recording.oom and recording.whole
    since = recording.whole.marks[[mark.kind for mark in recording.whole.marks].index("beyond")].sequence - 1
    stopped = parted(replace(recording.whole, whole=None), recording.oom, since, REPEATS)
    write_recording(tmp_path / "run.tonnage", stopped)
    again = read_recording(tmp_path / "run.tonnage")
    assert again.oom == stopped.oom and again.header == stopped.header and again.whole and stopped.whole
    assert again.allocations == stopped.allocations and again.whole.allocations == stopped.whole.allocations
    assert again.marks == stopped.marks and again.segments == stopped.segments
    assert ending_of(again) == REPEATS
    assert demand(again).header == demand(stopped).header


def test_on_another_card_it_dies_elsewhere_or_not_at_all(recording: Recording) -> None:
    fits = replay_on(recording, find_gpu("h200"))
    assert fits.fits and fits.whole is None and fits.oom is None
    dies = replay_on(recording, find_gpu("3080"))
    assert dies.oom and dies.whole
    assert len(demand(dies).allocations) == len(demand(recording).allocations)


def test_a_run_that_failed_later_is_no_run_that_fits(recording: Recording) -> None:
    assert recording.oom and recording.whole
    failed = parted(
        replace(recording.whole, header=replace(recording.whole.header, outcome="error")),
        recording.oom,
        40,
        "ValueError",
    )
    assert replay_on(failed, find_gpu("h200")).header.outcome == "error"


def test_a_run_within_the_limit_is_as_it_is() -> None:
    recording = training_run()
    assert as_its_card_saw_it(recording) is recording


# A run that died ends where it died.


def test_the_moment_has_the_levels_of_the_failure() -> None:
    recording = training_run(gpu="t4", batch=64)
    moment = moment_of_failure(recording)
    assert recording.timeline.allocated_bytes[moment] == recording.oom.allocated_bytes
    assert recording.timeline.reserved_bytes[moment] == recording.oom.reserved_bytes


def test_the_unwinding_is_cut_off() -> None:
    recording = training_run(gpu="t4", batch=64)
    moment = moment_of_failure(recording)
    # As a script unwinds: whatever was alive is freed.
    unwound = [replace(a, died=moment + 1 + n) if a.died is None else a for n, a in enumerate(recording.allocations)]
    cut = until_failure(replace(recording, allocations=unwound))
    assert len(cut.timeline.allocated_bytes) == moment + 1
    assert cut.timeline.allocated_bytes[-1] == recording.oom.allocated_bytes
    assert [a.died for a in cut.allocations if a.died and a.died > moment] == []
    assert cut.peak_allocated_bytes == recording.peak_allocated_bytes


def test_a_run_that_did_not_die_is_whole() -> None:
    recording = training_run()
    assert until_failure(recording) is recording
    died = training_run(gpu="t4", batch=64)
    unknown = replace(died, oom=replace(died.oom, allocated_bytes=1))
    assert moment_of_failure(unknown) is None and until_failure(unknown) is unknown

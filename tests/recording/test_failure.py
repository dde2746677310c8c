"""A run that died ends where it died."""

from dataclasses import replace

from support import training_run
from tonnage.recording.failure import moment_of_failure, until_failure


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

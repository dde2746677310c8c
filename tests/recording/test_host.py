"""The host's memory in a recording, and in its file."""

from dataclasses import asdict

import pytest

from support import training_run
from tonnage.recording import read_recording, write_recording
from tonnage.recording.cluster import ClusterSummary, RankSummary
from tonnage.recording.host import HostMoment, HostPeaks, groups_of, host_memory
from tonnage.units import GIB


def a_host() -> HostPeaks:
    loading = HostMoment(
        phase="setup",
        line="train.py:3",
        stack=("train.py:3",),
        parts={"parameters": 3 * GIB, "checkpoint": 3 * GIB, "python": GIB, "mapped_files": 9 * GIB},
        largest=groups_of([("parameters", "train.py:2", "empty", GIB)] * 3),
    )
    step = HostMoment(phase="forward", step=1, parts={"python": GIB})
    return HostPeaks(phases=(loading, step), mapped_peak_bytes=9 * GIB, resident_peak_bytes=16 * GIB)


def test_pages_of_files_are_not_needed():
    assert a_host().needed_bytes == 7 * GIB
    assert a_host().peak.phase == "setup"


def test_it_is_kept_in_the_file(tmp_path):
    recording = training_run()
    recording.host = a_host()
    write_recording(tmp_path / "a.tonnage", recording)
    assert read_recording(tmp_path / "a.tonnage").host == a_host()


def test_a_file_without_it_is_read_as_before(tmp_path):
    write_recording(tmp_path / "a.tonnage", training_run())
    assert read_recording(tmp_path / "a.tonnage").host is None


@pytest.mark.parametrize(
    "change",
    [
        {"phases": []},
        {"phases": 3},
        {"mapped_peak_bytes": -1},
        {"phases": [{"phase": 1}]},
        {"more": 1},
        {"phases": [None]},
    ],
)
def test_values_that_no_run_has_are_refused(change):
    values = asdict(a_host())
    values["phases"] = [asdict(moment) | {"stack": [], "largest": []} for moment in a_host().phases]
    with pytest.raises(ValueError, match="its "):
        host_memory(values | change)


def test_more_phases_than_a_run_has_are_refused():
    values = asdict(a_host())
    phase = asdict(a_host().phases[0]) | {"stack": [], "largest": []}
    assert len(host_memory(values | {"phases": [phase] * 1000}).phases) == 1000
    with pytest.raises(ValueError, match="1001 rows"):
        host_memory(values | {"phases": [phase] * 1001})


def test_the_ranks_of_the_fullest_host_are_added_up():
    ranks = (
        RankSummary(rank=0, stands_for=(0,), outcome="ok", host_bytes=20 * GIB),
        RankSummary(rank=1, stands_for=(1, 2, 3), outcome="ok", host_bytes=2 * GIB),
    )
    summary = ClusterSummary(
        words="", gpu="h200", gpu_name="", capacity_bytes=1, gpus=4, hosts=2, gpus_per_host=2, outcome="ok",
        exit_status=0, ranks=ranks,
    )  # fmt: skip
    assert [rank.host_bytes for rank in summary.host_ranks] == [20 * GIB, 2 * GIB]

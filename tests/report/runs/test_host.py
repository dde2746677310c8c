"""What a report says of the host's memory."""

from dataclasses import replace

from support import training_run
from tonnage.explain import Advice
from tonnage.recording.cluster import ClusterSummary, RankSummary
from tonnage.recording.host import HostMoment, HostPeaks
from tonnage.report.runs.host import host_figures, host_lines, ranks_host_lines
from tonnage.report.runs.terminal import card_figures
from tonnage.units import GIB


def a_run(**parts):
    recording = training_run()
    moment = HostMoment(phase="setup", line="train.py:3", parts=parts)
    recording.host = HostPeaks(phases=(moment,), mapped_peak_bytes=parts.get("mapped_files", 0))
    return recording


def words(lines) -> str:
    return " ".join(" ".join(line.plain.split()) for line in lines)


def test_the_line_names_the_height_and_its_parts():
    said = words(host_lines(a_run(parameters=3 * GIB, checkpoint=3 * GIB, python=GIB // 2, mapped_files=2 * GIB)))
    assert said.startswith("host memory 6.50 GiB of the ")
    assert "before any step, at train.py:3" in said
    assert "checkpoint being read 3.00 GiB" in said
    assert said.endswith("file cache for 2.00 GiB of mapped files, which the host may drop")


def test_little_is_said_only_when_asked_for():
    small = a_run(python=GIB // 2)
    assert not words(host_lines(small))
    assert "host memory 512.00 MiB" in words(host_lines(small, verbose=True))


def test_a_recording_without_it_says_nothing():
    assert not list(host_lines(training_run(), verbose=True))
    assert host_figures(None) is None
    assert card_figures(training_run(), Advice())["host"] is None


def test_more_than_the_host_has_is_red():
    lines = list(host_lines(a_run(parameters=10_000 * GIB)))
    assert lines[0].style == "red"


def test_ranks_are_added_up_and_files_are_shared():
    rank = RankSummary(rank=0, stands_for=tuple(range(8)), outcome="ok", host_bytes=12 * GIB, host_mapped_bytes=5 * GIB)
    summary = ClusterSummary(
        words="", gpu="h200", gpu_name="", capacity_bytes=1, gpus=8, hosts=1, gpus_per_host=8, outcome="ok",
        exit_status=0, ranks=(rank,),
    )  # fmt: skip
    said = words(ranks_host_lines(summary))
    assert said.startswith("needs 96.0 GiB of host memory with 8 ranks, 12.0 of it per rank, of a host's ")
    assert said.endswith("file cache for 5.00 GiB of mapped files, which the host may drop, once for all ranks")
    huge = replace(summary, ranks=(replace(rank, host_bytes=1000 * GIB),))
    assert "the host has not as much" in words(ranks_host_lines(huge))

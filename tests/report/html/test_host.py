"""The host's memory on the pages."""

import re
from dataclasses import replace

from clusters import cluster_of, rank_run
from hostile_recordings import HOSTILE
from support import training_run
from tonnage.recording.cluster import WholeModel
from tonnage.recording.host import HostGroup, HostMoment, HostPeaks
from tonnage.report.html import render_cluster_page, render_page
from tonnage.units import GIB


def a_host(line="train.py:3", **parts):
    group = HostGroup("parameters", line, "_to_copy", 3, parts.get("parameters", 0))
    moments = (
        HostMoment(phase="setup", line=line, parts=parts, largest=(group,)),
        HostMoment(phase="forward", step=1, line="train.py:9", parts={"python": GIB}),
    )
    return HostPeaks(phases=moments, mapped_peak_bytes=parts.get("mapped_files", 0))


def a_run(**parts):
    recording = training_run()
    recording.host = a_host(**parts)
    return recording


def section(page):
    return re.search(r'<section id="host">.*?</section>', page, re.DOTALL)[0]


def sizes(page, name):
    table = re.search(rf'id="{name}".*?</table>', page, re.DOTALL)[0]
    return [int(found) for found in re.findall(r'data-bytes="(\d+)"', table)]


def test_the_peak_its_parts_and_its_lines_are_shown():
    shown = section(render_page(a_run(parameters=6 * GIB, python=GIB, mapped_files=2 * GIB)))
    assert sizes(shown, "host-rows") == [6 * GIB, GIB, 7 * GIB]
    assert sizes(shown, "host-phases") == [7 * GIB, GIB]
    assert sizes(shown, "host-largest") == [6 * GIB]
    assert "before any step" in shown and "train.py:3" in shown
    assert "file cache for 2.00 GiB of mapped files" in shown


def test_a_recording_without_it_has_no_such_section():
    assert 'id="host"' not in render_page(training_run())


def test_words_of_a_recording_are_no_markup():
    recording = a_run(line=HOSTILE, **{HOSTILE: GIB})
    assert HOSTILE not in section(render_page(recording))
    run = replace(rank_run(0, (0, 1)), recording=recording)
    assert HOSTILE not in section(render_cluster_page(cluster_of("2xh200", run)))


def test_ranks_of_a_host_are_side_by_side_and_added_up():
    runs = []
    for rank, ranks in ((0, (0,)), (1, (1, 2, 3))):
        run = rank_run(rank, ranks)
        run.recording.host = a_host(parameters=6 * GIB, python=GIB)
        runs.append(replace(run, whole_model=WholeModel("DDP", 6 * GIB, 4)))
    shown = section(render_cluster_page(cluster_of("4xh200", *runs)))
    each, total = [6 * GIB, GIB, 7 * GIB], [24 * GIB, 4 * GIB, 28 * GIB]
    assert sizes(shown, "host-rank-rows") == [*each, *each, *total]
    assert "1–3 <span" in shown and "× 3" in shown
    assert "The run needs 28.0 GiB of host memory with 4 ranks, 7.0 of it per rank" in shown
    assert "4 ranks each hold the whole model, 24.0 GiB in all: 18.0 GiB less if one rank loads it" in shown


def test_a_cluster_whose_host_is_not_known_has_no_such_section():
    assert 'id="host"' not in render_cluster_page(cluster_of("2xh200", rank_run(0, (0, 1))))

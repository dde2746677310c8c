"""A cluster's page as text: every kind with its figures, the odd one named, each report packed, and no markup but ours."""

import gzip
import math
import re
from base64 import b64decode
from dataclasses import replace
from itertools import accumulate, combinations
from pathlib import Path

import pytest

from clusters import cluster_of, hostile_cluster, one_dies, one_odd, rank_run
from html_tags import Tags
from support import Run
from tonnage.explain import advise
from tonnage.recording import Recording, open_cluster, write_cluster
from tonnage.report.html import render_cluster_page, render_page
from tonnage.report.html.markup import read_parts
from tonnage.report.html.series import MOST_STRETCHES, line_of
from tonnage.report.runs.odd_ranks import compare_ranks


def part(page: str, name: str, end: str) -> str:
    found = re.search(rf'id="{name}".*?{end}', page, re.DOTALL)
    assert found, name
    return found[0]


def sizes(text: str) -> list[int]:
    return [int(found) for found in re.findall(r'data-bytes="(-?\d+)"', text)]


def report_of(page: str, rank: int) -> str:
    packed = re.search(rf'id="report-{rank}">([^<]*)</script>', page)
    assert packed
    return gzip.decompress(b64decode(packed[1])).decode()


def test_every_kind_is_a_row_with_its_sums() -> None:
    cluster = one_odd()
    page = render_cluster_page(cluster)
    kinds = compare_ranks(cluster.summary).kinds
    rows = part(page, "rank-rows", "</section>")
    assert sizes(rows) == [kind.process_bytes for kind in kinds]
    assert "ranks 0–6" in rows and "× 7" in rows
    cells = part(page, "category-rows", "</table>").split("<tr>")[2:]
    for kind, row in zip(kinds, cells, strict=True):
        *held, total = sizes(row)
        assert sum(held) == total == kind.process_bytes


def test_the_odd_one_is_marked_and_told_in_words() -> None:
    page = render_cluster_page(one_odd())
    found = compare_ranks(one_odd().summary)
    assert found.words_of(found.odd[0])[1:] in part(page, "odd", "</div>")
    assert "odd one out" in part(page, "rank-7", "bar-cell") and "odd one out" not in part(page, "rank-0", "bar-cell")


def test_where_all_hold_the_same_the_page_says_so() -> None:
    page = render_cluster_page(cluster_of("2xh200", rank_run(0), rank_run(1)))
    assert "All ranks hold the same" in page and "each rank holds" in page
    assert "odd one" not in page.split("<main")[1].split("<script")[0]


def test_where_none_stands_out_the_page_says_how_far_they_are_apart() -> None:
    cluster = cluster_of("2xh200", rank_run(0), rank_run(1, batch=16))
    few, many = (rank.peak_process_bytes for rank in cluster.summary.ranks)
    assert sizes(part(render_cluster_page(cluster), "odd", "</p>")) == [many - few]


def test_the_rank_that_dies_first_is_told_with_its_line() -> None:
    cluster = one_dies()
    page = render_cluster_page(cluster)
    oom = cluster.recording_of(1).oom
    assert "Rank 1 dies first." in page and "does not fit" in page
    assert sizes(part(page, "oom", "</div>"))[:2] == [oom.requested_bytes, oom.free_bytes]
    assert "dies first" in part(page, "rank-1", "bar-cell") and "stopped" in part(page, "rank-0", "bar-cell")
    assert 'class="capacity"' in page


def test_the_card_is_drawn_only_where_it_is_near() -> None:
    assert 'class="capacity"' not in render_cluster_page(one_odd())


def test_what_the_engines_hold_is_a_row_for_ranks_alike() -> None:
    rows = part(render_cluster_page(one_odd()), "engine-rows", "</table>")
    assert sizes(rows) == [2**27, 2**28] and "0–7" in rows
    assert "all-gather buffers" in rows


def test_behind_each_kind_is_its_own_full_page() -> None:
    cluster = one_odd()
    page = render_cluster_page(cluster)
    recording = cluster.recording_of(7)
    assert report_of(page, 7) == render_page(recording, advise(recording), stretches=4000)
    assert set(re.findall(r'<script type="text/plain" id="report-(\d+)"', page)) == {"0", "7"}


def test_a_page_allows_what_its_reports_need() -> None:
    """A frame is under the policy of the page around it as well as its own."""
    page = render_cluster_page(one_odd())
    outer, inner = (set(re.findall(r"'sha256-[^']+'", text)) for text in (page, report_of(page, 0)))
    assert inner < outer


def test_the_advice_is_for_the_rank_that_needs_most() -> None:
    cluster = one_odd()
    assert "What to do for rank 7" in render_cluster_page(cluster, advise(cluster.recording_of(7)))


def test_the_first_to_die_among_others_like_it_is_marked() -> None:
    first, second = (replace(rank_run(rank, gpu="t4", batch=512, layers=32), calls=3 - rank) for rank in (0, 1))
    cluster = cluster_of("2xt4", first, second)
    assert cluster.summary.dies_first == 1
    page = render_cluster_page(cluster)
    assert "Rank 1 dies first." in page and "dies first" in part(page, "rank-0", "bar-cell")


def test_what_the_one_that_dies_has_more_is_told_where_it_is_not_odd() -> None:
    small = {"gpu": "t4", "layers": 1}
    runs = (rank_run(0, **small), rank_run(1, batch=16, **small), rank_run(2, gpu="t4", batch=40, layers=32))
    cluster = cluster_of("3xt4", *runs)
    found = compare_ranks(cluster.summary)
    assert (cluster.summary.dies_first, found.odd) == (2, ())
    assert found.words_of(found.kinds[2])[1:] in part(render_cluster_page(cluster), "odd", "</p>")


def test_ranks_that_allocate_nothing_have_a_page() -> None:
    page = render_cluster_page(cluster_of("1xh200", replace(rank_run(0), recording=Run().recording)))
    assert "Nothing was allocated" in page and "All ranks hold the same" in page


def test_nobody_reported() -> None:
    page = render_cluster_page(cluster_of("2xh200", trouble="Nobody goes on: rank 0 waits."))
    assert "Nobody goes on" in page and "none reported" in page
    assert 'id="timeline" hidden' in page and "rank-row" not in page.split("<main")[1]


def test_nothing_is_fetched() -> None:
    page = re.sub(r'<script type="text/plain".*?</script>', "", render_cluster_page(one_odd()))
    assert not re.search(r"https?:|\bsrc=|href=|url\(|@import|\bfetch\(|XMLHttpRequest|import\(", page)
    assert "default-src 'none'" in page


def test_what_a_recording_says_is_words_and_never_markup() -> None:
    plain, hostile = render_cluster_page(one_dies()), render_cluster_page(hostile_cluster())
    known = {tag for tag, _ in Tags(plain).found} | {"ol", "code", "details", "summary", "br"}
    for tag, attributes in Tags(hostile).found:
        assert tag in known
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "style", "srcdoc")]
    assert hostile.count("<script") == hostile.count("</script>") == plain.count("<script")
    assert hostile.count("&lt;img") > 8


def test_a_page_from_a_file_is_the_page_of_the_run(tmp_path: Path) -> None:
    cluster = one_odd()
    write_cluster(tmp_path / "run.tonnage", cluster)
    again = open_cluster(tmp_path / "run.tonnage")
    assert again is not None
    assert render_cluster_page(again) == render_cluster_page(cluster)


def test_recordings_are_read_one_after_the_other() -> None:
    """Each kind once in a row, so that one at a time is held."""
    cluster, read = one_odd(), []

    def reading(rank: int) -> Recording:
        read.append(rank)
        return cluster.recording_of(rank)

    render_cluster_page(replace(cluster, recording_of=reading))
    assert read == [7, 0, 7]


# Lines


@pytest.mark.parametrize("samples", [1, 7, 200])
def test_no_peak_of_a_line_is_lost(samples: int) -> None:
    recording = one_odd().recording_of(7)
    stretches = line_of(recording, samples)["stretches"]
    assert [stretch["name"] for stretch in stretches] == ["setup", "step 1", "step 2"]
    for kind, peak in (("allocated", recording.peak_allocated_bytes), ("reserved", recording.peak_reserved_bytes)):
        assert max(max(accumulate(stretch[kind])) for stretch in stretches) == peak
    assert sum(stretch["events"] for stretch in stretches) == len(recording.timeline.allocated_bytes)


def test_very_many_steps_are_taken_together_and_what_comes_back_has_a_number() -> None:
    run = Run()
    for number in range(1, 1001):
        run.step(number)
        run.alloc(4096)
    names = [stretch["name"] for stretch in line_of(run.recording, 100)["stretches"]]
    assert names[:2] == ["steps 1–4", "steps 5–8"] and len(names) == 250 <= MOST_STRETCHES
    run = Run()
    for number in (1, 0, 2, 0):
        run.step(number)
        run.alloc(4096)
    assert [s["name"] for s in line_of(run.recording, 9)["stretches"]] == ["step 1", "setup", "step 2", "setup (2)"]


@pytest.mark.parametrize("scheme", [0, 1])
def test_the_colours_of_ranks_differ(scheme: int) -> None:
    found = re.findall(r"--line-\d: #(\w{6})", read_parts("lines.css"))[8 * scheme : 8 * scheme + 8]
    colours = [tuple(bytes.fromhex(colour)) for colour in found]
    assert len(colours) == 8
    assert min(math.dist(a, b) for a, b in combinations(colours, 2)) > 50

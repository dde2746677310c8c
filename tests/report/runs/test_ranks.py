"""The report of a cluster's ranks: 80 columns, ranks alike in one line, the one that dies first in full."""

import io
from typing import Any

import pytest

from clock.test_step import PRODUCT, step
from clusters import cluster_of, one_dies, one_odd, rank_run
from tonnage.explain import Advice
from tonnage.recording import ClusterRecording
from tonnage.report.runs.ranks import cluster_figures, print_ranks
from tonnage.virtual.cluster import RankRun


def shown(run: ClusterRecording) -> str:
    stream = io.StringIO()
    print_ranks(run, Advice(), stream=stream, verbose=False)
    return stream.getvalue()


@pytest.fixture
def uneven() -> ClusterRecording:
    return cluster_of("8xh200", rank_run(0, (0, 1, 2)), rank_run(3, (3, 5)), rank_run(4, (4, 6, 7), batch=16))


def test_ranks_with_the_same_figures_share_a_line(uneven: ClusterRecording) -> None:
    words = shown(uneven)
    assert "8 × h200 in 1 host" in words
    assert "  0–3, 5 (5)" in words
    assert "  4, 6–7 (3)" in words
    assert "rank 4, which needs most" in words
    assert "all-gather buffers" in words
    assert all(len(line) <= 80 for line in words.splitlines())


def test_figures_are_those_of_the_rank_that_needs_most_and_of_all(uneven: ClusterRecording) -> None:
    figures: dict[str, Any] = cluster_figures(uneven, Advice())
    assert (figures["rank"], figures["outcome"], figures["fits"], figures["world_size"]) == (4, "ok", True, 8)
    assert figures["peak_allocated_bytes"] == max(rank["peak_allocated_bytes"] for rank in figures["ranks"])
    assert [rank["ranks_alike"] for rank in figures["ranks"]] == [3, 2, 3]
    for rank in figures["ranks"]:
        assert sum(rank["ledger"].values()) == sum(rank["stream_bytes"].values()) == rank["peak_allocated_bytes"]


def test_the_odd_one_is_marked_and_told_in_words() -> None:
    words = shown(one_odd())
    (marked,) = [line for line in words.splitlines() if line.endswith("◂")]
    assert marked.startswith("  7  ")
    assert "  ◂ rank 7 holds " in words and " more than most ranks: activations +" in words
    figures: dict[str, Any] = cluster_figures(one_odd(), Advice())
    assert (figures["odd_ranks"], figures["typical_rank"]) == ([7], 0)


def test_where_ranks_are_alike_none_is_marked() -> None:
    assert "◂" not in shown(cluster_of("4xh200", rank_run(0, (0, 1, 2)), rank_run(3)))


def test_the_rank_that_dies_first_is_shown_and_decides() -> None:
    run = one_dies()
    assert (run.summary.outcome, run.summary.dies_first, run.summary.exit_status) == ("oom", 1, 1)
    assert "rank 1, which dies first" in shown(run)
    assert cluster_figures(run, Advice())["dies_first"] == 1


def test_trouble_between_ranks_is_told_even_where_none_reported() -> None:
    run = cluster_of("2xh200", trouble="Nobody goes on: rank 0 waits for rank 1; rank 1 waits for rank 0.")
    assert (run.summary.outcome, run.summary.exit_status, run.summary.worst) == ("error", 1, None)
    assert "Nobody goes on" in shown(run)
    figures = cluster_figures(run, Advice())
    assert (figures["fits"], figures["ranks"], figures["gpu_key"]) == (None, [], "h200")


def test_many_spans_of_ranks_fit_into_their_column() -> None:
    runs = (rank_run(0, tuple(range(0, 1024, 2))), rank_run(1, tuple(range(1, 1024, 2)), batch=16))
    words = shown(cluster_of("1024xh200", *runs))
    assert "0, … 1022 (512)" in words
    assert all(len(line) <= 80 for line in words.splitlines())


def timed(rank: int, times: int) -> RankRun:
    run = rank_run(rank)
    run.recording.captured = step(PRODUCT, times=times)
    return run


def test_a_step_is_as_long_as_that_of_the_slowest_rank() -> None:
    run = cluster_of("2xh200", timed(0, 20), timed(1, 40))
    words = shown(run)
    assert "on rank 1, the slowest (" in words
    assert "tokens/s a rank" in words
    figures: dict[str, Any] = cluster_figures(run, Advice())
    first, second = (rank["step_time_s"] for rank in figures["ranks"])
    assert first < second == figures["step_time_s"]
    assert figures["slowest_rank"] == 1


def test_ranks_that_take_as_long_are_told_as_one() -> None:
    assert "on every rank (" in shown(cluster_of("2xh200", timed(0, 20), timed(1, 20)))


def test_where_a_rank_dies_nothing_is_said_of_time() -> None:
    run = one_dies()
    assert run.summary.slowest is None
    assert "a step takes" not in shown(run)
    assert "step_time_s" not in cluster_figures(run, Advice())

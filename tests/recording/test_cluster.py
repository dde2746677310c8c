"""A cluster's file: every rank reads back, alike ones are kept once, and nothing in it is trusted."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster_of, one_dies, one_odd, rank_run
from strange_numbers import STRANGE_NUMBERS, opens_or_says_why
from support import training_run
from tonnage.errors import BadRecording, OutputExists
from tonnage.recording import ClusterRecording, open_cluster, open_recording, write_cluster, write_recording
from tonnage.recording.cluster import _spans


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "run.tonnage"
    write_cluster(path, one_odd())
    return path


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@pytest.mark.parametrize("cluster", [one_odd(), one_dies()], ids=["fits", "dies"])
def test_every_rank_reads_back(tmp_path: Path, cluster: ClusterRecording) -> None:
    write_cluster(tmp_path / "run.tonnage", cluster)
    again = open_cluster(tmp_path / "run.tonnage")
    assert again is not None and again.summary == cluster.summary
    for rank in cluster.summary.ranks:
        assert again.recording_of(rank.rank) == cluster.recording_of(rank.rank)


def test_a_file_from_before_ranks_had_times_opens(written: Path) -> None:
    change(written, "UPDATE rank SET summary = json_remove(summary, '$.step_time_s')")
    change(written, "PRAGMA user_version = 4")
    again = open_cluster(written)
    assert again is not None and again.summary == one_odd().summary
    assert again.summary.slowest is None


@pytest.mark.parametrize("key", ["worst", "gpus", "hosts", "dies_first", "exit_status", "capacity_bytes"])
def test_a_cluster_with_any_number_opens_or_is_refused_in_a_sentence(written: Path, key: str) -> None:
    with closing(sqlite3.connect(written, isolation_level=None)) as database:
        for number in STRANGE_NUMBERS:
            database.execute("UPDATE cluster SET value = ? WHERE key = ?", (number, key))
            problem = opens_or_says_why(written)
            assert problem or number in ("-1", "null"), number
    if key == "worst":
        change(written, "UPDATE cluster SET value = 'Infinity' WHERE key = 'worst'")
        with pytest.raises(BadRecording, match=r"not a readable recording: its worst rank is inf\."):
            open_recording(written)


@pytest.mark.parametrize(
    "ranges", ["Infinity", "[[0, Infinity]]", "[[NaN, 0]]", "[[-1, 0]]", "[[0, 1e999]]", '[["0", 0]]', "[[0]]", "{}"]
)
def test_a_rank_that_stands_for_no_ranks_is_refused_in_a_sentence(written: Path, ranges: str) -> None:
    with closing(sqlite3.connect(written, isolation_level=None)) as database:
        (value,) = database.execute("SELECT summary FROM rank WHERE rank = 0").fetchone()
        summary = json.loads(value)
        spoilt = json.dumps(summary | {"stands_for": "@"}).replace('"@"', ranges)
        database.execute("UPDATE rank SET summary = ? WHERE rank = 0", (spoilt,))
    assert "stands for" in opens_or_says_why(written) or "stands_for" in opens_or_says_why(written)


def test_ranks_that_did_the_same_are_kept_once(written: Path) -> None:
    like, odd = (len(training_run(**words).allocations) for words in ({}, {"batch": 16, "layers": 6}))
    assert rows(written, "allocation") == like + odd
    assert rows(written, "rank") == 3


def test_ranks_with_the_same_figures_and_other_events_are_both_kept(tmp_path: Path) -> None:
    other = rank_run(1)
    other = replace(other, recording=replace(other.recording, marks=other.recording.marks[:-1]))
    cluster = cluster_of("2xh200", rank_run(0), other)
    write_cluster(tmp_path / "run.tonnage", cluster)
    assert open_recording(tmp_path / "run.tonnage", 1) == other.recording


def test_one_rank_is_read_by_its_number_by_who_ran_for_it_or_as_the_worst(written: Path) -> None:
    cluster = one_odd()
    assert open_recording(written) == open_recording(written, 7) == cluster.recording_of(7)
    assert open_recording(written, 5) == cluster.recording_of(3)
    with pytest.raises(BadRecording, match="does not hold rank 8") as caught:
        open_recording(written, 8)
    assert "0, 3, 7" in caught.value.hint


def test_a_rank_is_asked_of_clusters_alone(tmp_path: Path) -> None:
    write_recording(tmp_path / "one.tonnage", training_run())
    assert open_cluster(tmp_path / "one.tonnage") is None
    with pytest.raises(BadRecording, match="the run of one GPU"):
        open_recording(tmp_path / "one.tonnage", 0)


def test_the_summary_is_read_without_any_rank(written: Path) -> None:
    change(written, "DELETE FROM context")
    cluster = open_cluster(written)
    assert cluster is not None and cluster.summary == one_odd().summary
    with pytest.raises(BadRecording, match="not a readable recording"):
        cluster.recording_of(0)


def test_a_cluster_of_which_no_rank_reported_is_kept(tmp_path: Path) -> None:
    write_cluster(tmp_path / "run.tonnage", cluster_of("2xh200", trouble="Nobody goes on."))
    cluster = open_cluster(tmp_path / "run.tonnage")
    assert cluster is not None and cluster.summary.trouble == "Nobody goes on."
    with pytest.raises(BadRecording, match="no rank reported"):
        open_recording(tmp_path / "run.tonnage")


def test_an_existing_file_stays_unless_forced(written: Path) -> None:
    before = written.read_bytes()
    with pytest.raises(OutputExists):
        write_cluster(written, one_dies())
    assert written.read_bytes() == before
    write_cluster(written, one_dies(), force=True)
    assert written.read_bytes() != before


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM cluster WHERE key = 'gpus'",
        "UPDATE cluster SET value = '0' WHERE key = 'gpus'",
        "UPDATE cluster SET value = '10000000000' WHERE key = 'gpus'",
        "UPDATE cluster SET value = '6' WHERE key = 'worst'",
        "UPDATE cluster SET value = '\"fine\"' WHERE key = 'outcome'",
        "UPDATE cluster SET value = '[1]' WHERE key = 'arguments'",
        "UPDATE cluster SET value = 'null' WHERE key = 'words'",
        "UPDATE rank SET summary = '[]'",
        "UPDATE rank SET summary = '{}'",
        "UPDATE rank SET summary = json_set(summary, '$.peak_process_bytes', 'much')",
        "UPDATE rank SET summary = json_set(summary, '$.peak_process_bytes', -1)",
        "UPDATE rank SET summary = json_set(summary, '$.ledger', json('{\"<b>\": 1}'))",
        "UPDATE rank SET summary = json_set(summary, '$.engine_bytes', json('[1]'))",
        "UPDATE rank SET summary = json_set(summary, '$.stands_for', json('[[0, 1000000000000]]'))",
        "UPDATE rank SET summary = json_set(summary, '$.stands_for', json('[[0, 7], [0, 7]]'))",
        "UPDATE rank SET summary = json_set(summary, '$.stands_for', json('[]'))",
        "UPDATE rank SET summary = json_set(summary, '$.stopped', 'no')",
        "UPDATE rank SET summary = json_set(summary, '$.host_parts', json('[1]'))",
        "UPDATE rank SET summary = json_set(summary, '$.whole_model', json('{\"engine\": 1}'))",
    ],
)
def test_damaged_rows_are_refused_in_words(written: Path, statement: str) -> None:
    change(written, statement)
    with pytest.raises(BadRecording, match="not a readable recording"):
        open_cluster(written)


def test_a_file_with_other_tables_is_refused(written: Path) -> None:
    change(written, "CREATE VIEW sneaky AS SELECT * FROM allocation")
    with pytest.raises(BadRecording, match="its tables are others"):
        open_cluster(written)


@given(st.sets(st.integers(0, 200)))
def test_spans_are_the_ranks(ranks: set[int]) -> None:
    spans = _spans(tuple(sorted(ranks)))
    assert [rank for first, last in spans for rank in range(first, last + 1)] == sorted(ranks)
    assert len(spans) == sum(rank - 1 not in ranks for rank in ranks)

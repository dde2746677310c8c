"""The commands on a cluster's recording: kept whole, shown whole or by rank, explained and compared by rank."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tonnage.virtual.cluster
from clusters import cluster_of, one_dies, one_odd, rank_run
from support import training_run
from tonnage.commands.app import app
from tonnage.commands.run import command
from tonnage.errors import BadRecording, BadTrace, RequestError
from tonnage.recording import open_cluster, write_cluster, write_recording
from virtual_runs import run_tonnage


@pytest.fixture
def kept(tmp_path: Path) -> str:
    path = tmp_path / "run.tonnage"
    write_cluster(path, one_odd())
    return str(path)


def invoke(*words: str):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_run_keeps_every_rank_and_show_says_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (rank_run(0, (0, 1, 2)), rank_run(3, (3, 4, 5, 6)), rank_run(7, batch=16, layers=6))
    ran = cluster_of("8xh200", *runs)
    monkeypatch.setattr(tonnage.virtual.cluster, "run_cluster", lambda *_, **__: ran)
    script, path, answer = tmp_path / "train.py", tmp_path / "run.tonnage", tmp_path / "answer.json"
    script.write_text("pass\n")
    assert command(["--gpus", "8xh200", "-o", str(path), "--json", str(answer), str(script)]) == 0
    said = capsys.readouterr().out
    cluster = open_cluster(path)
    assert cluster is not None and cluster.summary == one_odd().summary
    again = tmp_path / "again.json"
    shown = invoke("show", str(path), "--json", str(again))
    assert shown.output in said
    assert json.loads(again.read_text()) == json.loads(answer.read_text())


def test_where_no_rank_reported_the_file_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = cluster_of("2xh200", trouble="Nobody goes on: rank 0 waits for rank 1.")
    monkeypatch.setattr(tonnage.virtual.cluster, "run_cluster", lambda *_, **__: ran)
    (tmp_path / "train.py").write_text("pass\n")
    path = str(tmp_path / "run.tonnage")
    assert command(["--gpus", "2xh200", "-o", path, str(tmp_path / "train.py")]) == 1
    page = tmp_path / "page.html"
    assert "Nobody goes on" in invoke("show", path).output
    invoke("show", path, "--html", str(page))
    assert "Nobody goes on" in page.read_text()
    for words in (["explain", path], ["diff", path, path], ["show", path, "--rank", "0"]):
        with pytest.raises(BadRecording, match="no rank reported"):
            invoke(*words)


def test_show_writes_one_page_for_all_ranks_or_that_of_one(kept: str, tmp_path: Path) -> None:
    every, one = tmp_path / "every.html", tmp_path / "one.html"
    assert f"wrote {every}" in invoke("show", kept, "--html", str(every)).output
    assert "Ranks side by side" in every.read_text()
    done = invoke("show", kept, "--rank", "7", "--html", str(one))
    assert "rank 7 of 8 × h200" in done.stderr
    assert "Ranks side by side" not in one.read_text() and "Alive at the peak" in one.read_text()


def test_a_rank_that_did_not_run_is_shown_by_the_one_that_did(kept: str) -> None:
    done = invoke("show", kept, "--rank", "5", "--json", "-")
    assert "rank 5, for which rank 3 ran," in done.stderr
    assert json.loads(done.stdout)["peak_allocated_bytes"] == training_run().peak_allocated_bytes
    with pytest.raises(BadRecording, match="does not hold rank 8"):
        invoke("show", kept, "--rank", "8")


def test_explain_takes_the_worst_rank_or_the_one_that_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "dies.tonnage")
    write_cluster(tmp_path / "dies.tonnage", one_dies())
    done = invoke("explain", path)
    assert "rank 1 of 2 × t4" in done.stderr and "running it with" not in done.stderr
    assert "train.py:87" in done.stdout
    assert "rank 0 of 2 × t4" in invoke("explain", path, "--rank", "0").stderr


def test_diff_compares_two_ranks_of_one_file(kept: str) -> None:
    done = invoke("diff", kept, kept, "--ranks", "0,7")
    assert "run.tonnage rank 0" in done.output and "run.tonnage rank 7" in done.output
    assert "activations" in done.output and "no change" not in done.output
    assert "no change" in invoke("diff", kept, kept, "--ranks", "7").output
    assert "no change" in invoke("diff", kept, kept).output


@pytest.mark.parametrize("ranks", ["x", "1,2,3", "1,", "-1"])
def test_ranks_that_are_none_are_told(kept: str, ranks: str) -> None:
    with pytest.raises(RequestError, match="names no ranks"):
        invoke("diff", kept, kept, f"--ranks={ranks}")


def test_a_rank_of_one_gpu_s_run_is_told(tmp_path: Path) -> None:
    write_recording(tmp_path / "one.tonnage", training_run())
    for words in (["show", "--rank", "1"], ["explain", "--rank", "1"]):
        with pytest.raises(BadRecording, match="the run of one GPU"):
            invoke(words[0], str(tmp_path / "one.tonnage"), *words[1:])


def test_replay_says_that_a_recording_is_no_trace(kept: str) -> None:
    with pytest.raises(BadTrace, match="is a recording") as caught:
        invoke("replay", kept)
    assert "tonnage show" in caught.value.hint


def test_a_cluster_whose_ranks_are_alike_has_no_odd_one(tmp_path: Path) -> None:
    write_cluster(tmp_path / "run.tonnage", cluster_of("2xh200", rank_run(0), rank_run(1)))
    done = invoke("show", str(tmp_path / "run.tonnage"), "--json", "-")
    assert json.loads(done.stdout)["odd_ranks"] == []


def test_a_pipeline_from_the_script_to_the_page(tmp_path: Path) -> None:
    """The first of its stages has two blocks, the others one."""
    script = Path(__file__).parents[1] / "virtual" / "cluster" / "scripts" / "sharded.py"
    path, page = tmp_path / "run.tonnage", tmp_path / "page.html"
    done = run_tonnage("run", "--gpus", "3xh200", "-o", str(path), str(script), "pipeline", "--width", "2048")
    assert done.returncode == 0, done.stderr
    assert "◂ rank 0 holds" in done.stdout
    assert invoke("show", str(path)).output in done.stdout
    assert invoke("show", str(path), "--html", str(page)).output == f"wrote {page}\n"
    assert "Rank 0 holds" in page.read_text()
    assert "optimizer states" in invoke("diff", str(path), str(path), "--ranks", "1,0").output

"""What goes wrong between ranks, and before them: named in words, with both sides and their lines, and ended."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tonnage.commands.run import command
from virtual_runs import run_tonnage

SCRIPT = Path(__file__).parent / "scripts" / "bad.py"
SAME_CALLS = "All ranks of a group must make the same calls in the same order"


def line_of(text: str) -> str:
    """ "bad.py:12": where the script says this."""
    lines = SCRIPT.read_text().splitlines()
    return f"bad.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def ran(gpus: str, how: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The real command in this process, which has torch loaded already."""
    answer = folder / "answer.json"
    status = command(["--gpus", gpus, "--json", str(answer), str(SCRIPT), how])
    return status, json.loads(answer.read_text())


@pytest.mark.parametrize(
    ("gpus", "how", "words"),
    [
        ("4xh200", "mesh of threes",
         ["The mesh (1, 3) at LINE(WORLD // 3) takes 3 of 4 ranks", "leaves out rank 3", "--gpus 3xh200"]),
        ("4xh200", "small mesh", ["takes 2 of 4 ranks, and leaves out ranks 2 and 3"]),
        ("2xh200", "large mesh", ["Mesh should not be bigger than default world size 2"]),
        ("2xh200", "type",
         ["rank 0 calls all_reduce of float32 [8] at LINE(values.half)",
          "rank 1 calls all_reduce of float16 [8] at LINE(values.half)", SAME_CALLS]),
        ("2xh200", "order", ["rank 0 calls all_reduce of float32 [8]", "rank 1 calls all_reduce of float32 [16]"]),
        ("2xh200", "reduction", ["rank 0 calls all_reduce of", "rank 1 calls all_reduce (max) of float32 [8]"]),
        ("2xh200", "root", ["broadcast (from rank 0)", "broadcast (from rank 1)", SAME_CALLS]),
        ("2xh200", "group",
         ["in group 1 of ranks 0 and 1 at LINE(dist.all_reduce(values, group=pair)",
          "its last call: all_reduce of float32 [8]"]),
        ("2xh200", "group on the host", ["Nobody goes on", "in group 1 of ranks 0 and 1", "waits for rank 0"]),
        ("2xh200", "receive",
         ["rank 0 receives 4 elements of float32 from rank 1 at LINE(dist.recv(torch.zeros(4), 1)",
          "Give every receive a send"]),
        ("2xh200", "receive on the card", ["from rank 1", "which never sends it", "Give every receive a send"]),
        ("2xh200", "key", ["nobody' from the store at LINE(store.wait)", "Let a rank set the key before it is read"]),
        ("2xh200", "exit", ["rank 0 calls all_reduce of float32 [8]", "waits for rank 1, which has ended"]),
        ("2xh200", "exit 3", ["Rank 1: exit status 3"]),
        ("2xh200", "sudden end", ["Rank 1: its process ended with status 3 before the script did"]),
        ("2xh200", "another rank", ["calls itself rank 0, in the process of rank 1", "Let it read RANK"]),
        ("2xh200", "another world", ["a world of 4 ranks, and the cluster has 2", "Let it read WORLD_SIZE"]),
        ("2xh200", "spawn", ["spawns 4 processes on a host, and the cluster has 2", "--gpus 4xh200"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_ended(
    gpus: str, how: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, said = ran(gpus, how, tmp_path)
    assert status == (3 if how == "exit 3" else 1)
    assert (said["outcome"], said["fits"]) == ("error", None)
    for each in words:
        wanted = re.sub(r"LINE\((.+)\)", lambda found: line_of(found[1]), each)
        assert wanted in said["error"], said["error"]
    out, errors = capfd.readouterr()
    assert "failed" in out
    assert "tonnage/virtual" not in errors


@pytest.mark.parametrize(
    ("how", "words"), [("polling", "again and again, and nobody sets it"), ("socket", "has done nothing for 1 s at")]
)
def test_a_wait_that_nobody_can_end_is_named_and_ended(
    how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.virtual.cluster.rank._IDLE_S", 1.0)
    status, said = ran("2xh200", how, tmp_path)
    assert status == 1
    assert words in said["error"]
    assert line_of("store.check" if how == "polling" else "server.accept") in said["error"]


@pytest.mark.parametrize(("gpus", "how", "said"), [
    ("2xh200", "store of another host", "read 1"),
    ("4xh200", "spawn", "spawned 0 of 4"),
    ("2xh200", "no group", "alone with 8"),
])  # fmt: skip
def test_what_a_virtual_cluster_can_give_it_gives(
    gpus: str, how: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, answer = ran(gpus, how, tmp_path)
    assert (status, answer["outcome"]) == (0, "ok")
    assert capfd.readouterr().out.count(said) == 1
    alone = [note for note in answer["assumptions"] if "never calls init_process_group" in str(note)]
    assert len(alone) == 1


def test_shapes_that_ranks_do_not_divide_are_the_scripts_own_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, said = ran("8xh200", "heads", tmp_path)
    assert status == 1
    assert "is invalid for input of size 16" in said["error"]
    assert f'{SCRIPT}", line {line_of(".view(2").partition(":")[2]}' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "script", "words"),
    [
        ("8xh999", SCRIPT, "no GPU or host called 'h999'"),
        ("8x", SCRIPT, "Write it like h200, 8xh200, 2x8xh100"),
        ("0xh200", SCRIPT, "asks for 0 GPUs"),
        ("12xh200", SCRIPT, "does not fill hosts of 8 cards"),
        ("8xh200", SCRIPT.with_name("missing.py"), "There is no script at"),
        ("8xh200", SCRIPT.parent, "found a folder"),
    ],
)
def test_a_request_that_cannot_be_is_told_before_anything_runs(gpus: str, script: Path, words: str) -> None:
    done = run_tonnage("run", "--gpus", gpus, str(script), "type")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr

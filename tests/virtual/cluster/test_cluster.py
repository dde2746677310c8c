"""Scripts on a virtual cluster, from the command to the JSON: what ranks exchange, where they part, and what they hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.commands.run import command
from virtual_runs import run_tonnage

SCRIPTS = Path(__file__).parent / "scripts"
# As torchrun starts them, but as forks of a process that has loaded torch, each with a world that torch itself connects.
TWO_RANKS = """
import os, runpy, socket, sys
import torch.distributed
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
second = os.fork()
os.environ["RANK"] = "0" if second else "1"
runpy.run_path(sys.argv[1], run_name="__main__")
sys.exit(second and os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""


def run(gpus: str, script: str, folder: Path, *words: str) -> tuple[Any, dict[str, Any]]:
    answer = folder / "answer.json"
    done = run_tonnage("run", "--gpus", gpus, "--json", str(answer), str(SCRIPTS / script), *words)
    assert answer.exists(), done.stderr
    return done, json.loads(answer.read_text())


# What travels


def test_objects_counts_host_tensors_and_the_store_travel_between_ranks(tmp_path: Path) -> None:
    done, said = run("4xh200", "exchanges.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sum 10 largest 3.0 swapped [0, 1, 2, 3] hello" in done.stdout
    assert said["world_size"] == 4


def test_host_collectives_give_what_gloo_gives(tmp_path: Path) -> None:
    script = str(SCRIPTS / "host_collectives.py")
    real = subprocess.run([sys.executable, "-c", TWO_RANKS, script], capture_output=True, text=True, timeout=240)
    assert real.returncode == 0, real.stderr
    done, _ = run("2xh200", "host_collectives.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == json.loads(real.stdout.splitlines()[-1])


# One process with several cards


def test_cards_of_one_process_are_taken_as_one_and_the_report_says_so(tmp_path: Path) -> None:
    done, said = run("2xh200", "two_cards.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "One process has tensors on 2 cards. They are taken as one card" in " ".join(done.stdout.split())
    assert said["ranks"][0]["peak_allocated_bytes"] > 4 * (2**24 - 2**18)


# What goes wrong between ranks


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (("mismatched.py", "shape"), ("rank 0 calls all_reduce of float32 [8]", "rank 1 calls all_reduce of float32 [9]")),
        (("mismatched.py", "operation"), ("rank 0 calls all_reduce", "rank 1 calls broadcast", "mismatched.py:12")),
        (("waits.py", "barrier"), ("rank 0 calls barrier at waits.py:12", "waits for rank 1, which has ended")),
        (("waits.py", "collective"), ("rank 0 calls all_reduce of float32 [2097152]", "waits for rank 1")),
        (("waits.py", "circle"), ("Nobody goes on", "waits for rank 1", "waits for rank 0")),
        (("waits.py", "raises"), ("Rank 1: ValueError: rank 1 has no data",)),
    ],
)  # fmt: skip
def test_ranks_that_do_not_meet_are_named_and_ended(
    words: tuple[str, str], both: tuple[str, ...], tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    assert command(["--gpus", "2xh200", "--json", str(answer), str(SCRIPTS / words[0]), *words[1:]]) == 1
    said = json.loads(answer.read_text())
    assert said["outcome"] == "error"
    assert said["fits"] is None
    for each in both:
        assert each in said["error"], said["error"]


def test_a_rank_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    done, _ = run("2xh200", "waits.py", tmp_path, "raises")
    assert 'raise ValueError("rank 1 has no data")' in done.stderr
    assert "tonnage/virtual" not in done.stderr


def test_the_rank_that_dies_first_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    done, said = run("4xh200", "outgrows.py", tmp_path)
    assert done.returncode == 1
    assert (said["outcome"], said["dies_first"]) == ("oom", 3)
    assert {rank["rank"]: rank["outcome"] for rank in said["ranks"]} == {
        0: "stopped",
        1: "stopped",
        2: "stopped",
        3: "oom",
    }
    assert said["oom"]["line"] == "outgrows.py:8"
    assert "rank 3, which dies first" in done.stdout


# Layouts


@pytest.mark.parametrize(
    ("gpus", "layout", "calls"),
    [
        pytest.param("4xh200", "fsdp", 1, marks=pytest.mark.slow),  # runs below, too, with as many ranks
        ("4xh200", "hsdp", 2),
        ("2xh200", "tensor", 1),
        ("2xh200", "context", 1),
        ("2xh200", "expert", 1),
        ("4xh200", "composed", 2),
    ],
)
def test_every_layout_runs(gpus: str, layout: str, calls: int, tmp_path: Path) -> None:
    done, said = run(gpus, "sharded.py", tmp_path, layout)
    assert done.returncode == 0, done.stderr
    first = said["ranks"][0]
    assert f"peak {first['peak_allocated_bytes']}" in done.stdout
    assert sum(first["ledger"].values()) == first["peak_allocated_bytes"]
    communicators = [part for part in first["overhead_parts"] if part.startswith("NCCL")]
    assert len(communicators) == calls


def test_groups_and_engines_of_every_making_run(tmp_path: Path) -> None:
    done, said = run("4xh200", "engines.py", tmp_path, str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensors 4") == 1  # rank 0 runs once
    assert len(said["ranks"]) == 4
    assert str(tmp_path / "checkpoint" / ".metadata") in [file["path"] for file in said["writes"]["files"]]
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_differ(schedule: str, tmp_path: Path) -> None:
    done, said = run("3xh200", "sharded.py", tmp_path, "pipeline", "--schedule", schedule)
    assert done.returncode == 0, done.stderr
    states = [rank["ledger"]["optimizer_states"] for rank in said["ranks"]]
    assert states[0] == 2 * states[1] == 2 * states[2]  # the first stage has two blocks, the others one


def test_sharding_over_more_ranks_leaves_each_less(tmp_path: Path) -> None:
    _, two = run("2xh200", "sharded.py", tmp_path, "fsdp", "--width", "1024")
    _, four = run("4xh200", "sharded.py", tmp_path, "fsdp", "--width", "1024")
    halves = two["ranks"][0]["ledger"]["optimizer_states"], four["ranks"][0]["ledger"]["optimizer_states"]
    assert halves[0] == pytest.approx(2 * halves[1], rel=0.01)
    assert {"unsharded parameters", "all-gather buffers"} <= set(four["ranks"][0]["engine_bytes"])
    assert four["ranks"][0]["whole_model"]["engine"] == "fully_shard"
    assert four["ranks"][0]["whole_model"]["copies"] == 4
    assert four["ranks"][0]["host_parts"]["python"] > 0
    # How long a step takes, by its slowest rank.
    assert four["time_by_kind"]["collective"] > 0
    assert four["step_time_s"] == max(rank["step_time_s"] for rank in four["ranks"])
    assert four["slowest_rank"] in [rank["rank"] for rank in four["ranks"]]


def test_a_thousand_ranks_are_stood_for_by_a_few_and_uneven_shards_are_found(tmp_path: Path) -> None:
    done, said = run("128x8xh200", "sharded.py", tmp_path, "fsdp", "--blocks", "1")
    assert done.returncode == 0, done.stderr
    assert sum(rank["ranks_alike"] for rank in said["ranks"]) == said["world_size"] == 1024
    assert len(said["ranks"]) < 32
    # Matrices of 512 rows: the second half of the ranks has no part of them, and no states.
    states = {rank["rank"]: rank["ledger"]["optimizer_states"] for rank in said["ranks"]}
    assert states[0] > states[1023]


def test_a_mesh_that_does_not_match_the_cluster_is_the_scripts_own_error(tmp_path: Path) -> None:
    done, said = run("3xh200", "sharded.py", tmp_path, "hsdp")
    assert done.returncode == 1
    assert said["outcome"] == "error"
    assert "mesh" in said["error"].lower()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpus", "9x9x9xh200"], "does not name GPUs"),
        (["--gpus", "8xmi300x"], "stands in for CUDA's cards alone"),
        (["--gpus", "8xh200", "--gpu", "h200"], "--gpus"),
    ],
)
def test_a_wrong_request_is_told_before_anything_runs(words: list[str], problem: str) -> None:
    done = run_tonnage("run", *words, str(SCRIPTS / "sharded.py"), "fsdp")
    assert done.returncode == 2
    assert problem in done.stderr

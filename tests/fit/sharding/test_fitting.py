"""fit over a mesh as people call it: under torchrun, and what it says where ranks do not ask for the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tonnage
from fit.cases import CASES, build_training
from fit.sharding import worlds
from fit.sharding.test_shard import values
from tonnage.errors import RequestError

SCRIPT = Path(__file__).with_name("torchrun_script.py")
VIRTUAL_SCRIPT = Path(__file__).with_name("virtual_script.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(
        tmp_path_factory.mktemp("worlds"),
        "asking_for_different_things:2",
        "survey:2",
        "all_are_full:2",
        "one_is_full:2",
    )


def test_a_script_under_torchrun_shards_and_ends_though_batches_are_uneven(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["class"] == "FSDPSequential"
    assert first["techniques"] == ["shard"]
    assert (len(first["losses"]), len(second["losses"])) == (3, 2)
    assert first["losses"][:2] == second["losses"], "the loss is that of all ranks' batches"
    assert done.stdout.splitlines() == ["at the end: ['MainThread']"] * 2


def test_on_virtual_gpus_the_first_way_that_fits_each_budget_is_chosen(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("tonnage")),
        "run",
        "--write",
        "--gpus",
        "2xh200",
        str(VIRTUAL_SCRIPT),
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    roomy, tight = ranks[0]
    assert (roomy["shard"]["stage"], tight["shard"]["stage"]) == (2, 3)
    for fit in (roomy, tight):
        assert fit["rehearsed"] <= fit["budget"]
        assert fit["stepped"] <= fit["budget"]
    assert all(rank == ranks[0] for rank in ranks), "every rank decides the same"


def test_ranks_that_ask_for_different_things_are_told_so(found: dict[str, Any]) -> None:
    for answer in found["asking_for_different_things:2"]:
        assert answer["error"] == "RequestError"
        assert answer["message"].startswith("Ranks 0 and 1 ask for different plans")


def test_a_mesh_that_cannot_be_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    training = build_training(CASES["dropout"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
        with pytest.raises(RequestError, match="The mesh has 3 dimensions"):
            tonnage.fit(training.model, training.optimizer, loss=training.loss, sample=training.sample, mesh=mesh)
    finally:
        torch.distributed.destroy_process_group()


# Measuring: the same runs and the same figures on all ranks, and a full card of one is everyone's end -----------------


def test_ranks_of_other_speed_run_the_same_and_take_the_first_ones_figures(found: dict[str, Any]) -> None:
    first, second = values(found, "survey:2")
    assert first["calls"] == second["calls"]
    assert first["profile"] == second["profile"]
    assert first["own seconds"] != second["own seconds"]


def test_cards_that_are_all_full_are_a_measurement_like_others(found: dict[str, Any]) -> None:
    for answer in values(found, "all_are_full:2"):
        assert answer == ["OutOfMemoryError", "goes on"]


def test_one_card_that_is_full_ends_it_for_all(found: dict[str, Any]) -> None:
    for answer in found["one_is_full:2"]:
        assert answer["error"] == "RankFailed"
        assert answer["message"].startswith("Rank 1 raised")

"""Sharded trainings are those of one process: steps, gradients, checkpoints, in every way to shard."""

from typing import Any

import pytest

from fit.sharding import worlds

EXACT = 1e-12
PROGRAMS = "steps:2 four:4 hybrid:4 again:2 tied:2 mixed_precision:2 proof:2 checkpoints:2 hybrid_checkpoints:4 refused:2".split()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(tmp_path_factory.mktemp("worlds"), *PROGRAMS)


def values(found: dict[str, list[dict[str, Any]]], program: str) -> list[Any]:
    """What each rank returned."""
    answers = found[program]
    assert all("value" in answer for answer in answers), answers
    return [answer["value"] for answer in answers]


@pytest.mark.parametrize("program", ["steps:2", "four:4", "hybrid:4"])
def test_losses_gradients_and_parameters_are_those_of_one_process(found: dict[str, Any], program: str) -> None:
    for rank in values(found, program):
        for name, seen in rank.items():
            assert seen["sharded"], name
            for what in ("loss", "norm", "gradients", "parameters", "after undo"):
                assert seen[what] <= EXACT, (name, what, seen[what])
            assert seen["same objects"], f"{name}: undo gives back the parameters that the caller had"


def test_what_was_undone_can_be_sharded_again_with_its_states(found: dict[str, Any]) -> None:
    assert max(values(found, "again:2")) <= EXACT


def test_a_tied_parameter_is_one_before_and_after(found: dict[str, Any]) -> None:
    for rank in values(found, "tied:2"):
        assert max(rank[what] for what in ("loss", "gradients", "parameters", "after undo")) <= EXACT
        assert rank["same objects"]


def test_mixed_precision_computes_in_the_narrow_type_and_keeps_the_wide_one(found: dict[str, Any]) -> None:
    for rank in values(found, "mixed_precision:2"):
        assert rank["computed in"] == ["torch.bfloat16"]
        assert rank["kept in"] == ["torch.float32"]
        assert 0 < rank["loss"] < 0.05


def test_a_sharded_fit_can_be_proven(found: dict[str, Any]) -> None:
    for rank in values(found, "proof:2"):
        assert rank["compared"] == 30
        assert rank["error"] <= EXACT
        assert abs(rank["loss"]) <= EXACT


@pytest.mark.parametrize("program", ["checkpoints:2", "hybrid_checkpoints:4"])
def test_checkpoints_go_both_ways(found: dict[str, Any], program: str) -> None:
    for rank in values(found, program):
        for name, seen in rank.items():
            assert max(seen["into shards"], seen["out of shards"], seen["from files"]) <= EXACT, name
            assert seen["names"], "a state dict has the names of the plain model"


REFUSALS = {
    "stage": "FSDP2 has stages 2 and 3",
    "block": "no block 'nowhere'",
    "beside": "sharded over ranks and optimizer states on the host cannot stand together: it steps plain parameters",
    "later": "Activations cannot be moved to the host: the model has no block 'nowhere'",
    "dimensions": "dimensions of the mesh have no names",
    "no mesh": "mesh= takes a DeviceMesh, and got str",
    "weighting": "'rws' is no weighting",
    "no plan of one GPU": "there is no mesh of ranks: give mesh=",
    "budget": "fit measures GPU memory",
    "optimizer": "Adafactor cannot step shards: its moments are means over whole rows and columns",
    "scalar": "scale is a parameter without dimensions",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_said_on_every_rank_and_leaves_a_plain_model(found: dict[str, Any], name: str) -> None:
    for rank in values(found, "refused:2"):
        words, plain = rank[name]
        assert REFUSALS[name] in words
        assert plain

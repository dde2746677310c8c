"""A rank that raises ends the job on all ranks, with its own error; one that all share ends nothing."""

from typing import Any

import pytest

from fit.sharding import worlds
from fit.sharding.test_shard import EXACT, values

LIMIT_S = 30.0
# Who raises what, of how many.
BROKEN = {
    "first_raises_in_forward:2": (0, "ZeroDivisionError", "in forward"),
    "last_raises_in_backward:4": (3, "ZeroDivisionError", "in backward"),
    "one_raises_within_fit:2": (1, "ZeroDivisionError", "in forward"),
    "one_asks_for_nonsense:2": (1, "RequestError", "The optimizer steps 2 parameters that are not the model's."),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(tmp_path_factory.mktemp("worlds"), *BROKEN, "all_raise:2", "one_lingers:2")


@pytest.mark.parametrize("program", BROKEN)
def test_the_error_of_one_rank_reaches_all(found: dict[str, Any], program: str) -> None:
    culprit, kind, words = BROKEN[program]
    for rank, answer in enumerate(found[program]):
        told = (kind, words) if rank == culprit else ("RankFailed", f"Rank {culprit} raised {kind}: {words}")
        assert (answer["error"], answer["message"].partition("\n")[0]) == told
        assert ("Make the optimizer from" in answer["message"]) is (
            kind == "RequestError" and rank != culprit
        )  # its hint
        assert answer["ended after"] < LIMIT_S


def test_a_rank_that_raised_and_does_not_end_holds_nobody_up(found: dict[str, Any]) -> None:
    waiting, lingering = found["one_lingers:2"]
    assert waiting["ended after"] < LIMIT_S
    assert waiting["ended after"] < lingering["ended after"]
    assert "Rank 1 raised ZeroDivisionError: in forward" in waiting["said"]


def test_an_error_of_all_ranks_is_each_ones_own_and_training_goes_on(found: dict[str, Any]) -> None:
    for rank in values(found, "all_raise:2"):
        assert rank["raised"] == ["in forward", "in backward"]
        assert rank["loss"] <= EXACT

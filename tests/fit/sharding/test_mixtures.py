"""Models, batches and worlds as people mix them: what is frozen stays so, nobody waits, and everyone is told."""

from typing import Any

import pytest

from fit.sharding import worlds
from fit.sharding.test_shard import EXACT, values

PROGRAMS = "frozen:2 empty:2 empty_everywhere:2 loader_raises:2 all_leave:2 saved:2 resumed:4".split()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(tmp_path_factory.mktemp("worlds"), *PROGRAMS)


def test_frozen_parameters_and_adapters_train_as_in_one_process(found: dict[str, Any]) -> None:
    for rank in values(found, "frozen:2"):
        for name, seen in rank.items():
            assert seen["difference"] <= EXACT, name
            assert seen["still frozen"], name


def test_a_batch_without_rows_is_none(found: dict[str, Any]) -> None:
    for rank in values(found, "empty:2"):
        assert rank["steps"] == 4
        assert max(rank["loss"], rank["parameters"]) <= EXACT


def test_where_no_rank_has_rows_all_are_told_and_go_on(found: dict[str, Any]) -> None:
    for rank in values(found, "empty_everywhere:2"):
        assert rank["words"].startswith("No rank's batch has any rows.")
        assert rank["loss"] <= EXACT


def test_an_error_between_steps_reaches_those_who_wait(found: dict[str, Any]) -> None:
    other, culprit = found["loader_raises:2"]
    assert (culprit["error"], culprit["message"]) == ("FileNotFoundError", "part 2 of the data")
    assert (other["error"], other["message"]) == ("RankFailed", "Rank 1 raised FileNotFoundError: part 2 of the data")
    assert other["ended after"] < 30


def test_a_loop_that_all_ranks_leave_alike_ends_nothing(found: dict[str, Any]) -> None:
    assert max(values(found, "all_leave:2")) <= EXACT


def test_a_checkpoint_of_two_ranks_goes_on_with_four(found: dict[str, Any]) -> None:
    values(found, "saved:2")
    for rank in values(found, "resumed:4"):
        assert max(rank.values()) <= EXACT, rank

"""Measuring on several ranks: the same runs and the same figures on all, and a full card of one is everyone's end."""

from typing import Any

import pytest

from fit.sharding import worlds
from fit.sharding.test_shard import values


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(tmp_path_factory.mktemp("worlds"), "survey:2", "all_are_full:2", "one_is_full:2")


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

"""Ranks whose batches differ step as one process would on all of them, and none waits for a batch that is not there."""

from typing import Any

import pytest

from fit.sharding import worlds
from fit.sharding.test_shard import EXACT, values


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return worlds.run(tmp_path_factory.mktemp("worlds"), "uneven:4", "lacking:2", "lacking:4")


def test_other_rows_lengths_labels_and_shards_on_each_rank(found: dict[str, Any]) -> None:
    for rank in values(found, "uneven:4"):
        assert rank["steps"] == 3
        assert max(rank["loss"], rank["parameters"]) <= EXACT


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_last_batch_that_some_ranks_lack(found: dict[str, Any], ranks: int) -> None:
    answers = values(found, f"lacking:{ranks}")
    assert [answer["steps"] for answer in answers] == list(range(1, ranks + 1))
    for answer in answers:
        assert max(answer["loss"], answer["parameters"]) <= EXACT

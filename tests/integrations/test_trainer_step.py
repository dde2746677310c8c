"""Several batches as one."""

from typing import Any

import pytest
import torch

from tonnage.integrations.trainer_step import ITEMS, join, with_items


def test_batches_that_differ_in_rows_alone_are_joined() -> None:
    joined = join([{"x": torch.zeros(2, 3), "scale": 2}, {"x": torch.ones(1, 3), "scale": 2}])
    assert joined is not None
    assert joined["x"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert joined["scale"] == 2


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(2, 4), "scale": 2},
        {"x": torch.ones(2, 3), "scale": 3},
        {"x": torch.ones(2, 3)},
        {"x": torch.ones(2, 3), "scale": torch.ones(2)},
    ],
)
def test_batches_that_differ_otherwise_are_not(other: dict[str, Any]) -> None:
    assert join([{"x": torch.zeros(2, 3), "scale": 2}, other]) is None


def test_items_travel_with_a_batch_where_they_are_counted() -> None:
    batch = {"x": torch.zeros(2, 3)}
    assert set(with_items(batch, None)) == {"x"}
    assert with_items(batch, 5)[ITEMS] == 5

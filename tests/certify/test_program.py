"""What a call returned is built again, with other tensors in the same places."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tonnage.certify.program import CannotRepeat, ResultTree, TensorLayout, tensors_within


class Cache:
    def __init__(self, *layers: torch.Tensor) -> None:
        self.layers = [{"keys": layer, "size": 3} for layer in layers]
        self.kind = torch.float32


@dataclass
class Result(OrderedDict[str, Any]):
    loss: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update(loss=self.loss, cache=self.cache)


def read(value: Any) -> ResultTree:
    return ResultTree(value, lambda tensor: TensorLayout(0), torch.Tensor)


def test_every_tensor_finds_its_place() -> None:
    a, b, c = (torch.full((), float(number)) for number in range(3))
    value = {"plain": a, "nested": [b, (a, None, "word")], "cache": Cache(c), "number": 4}
    output = read(value)
    assert len(output.layouts) == 3
    new = [torch.full((), 10.0 + number) for number in range(3)]
    built = output.build(new)
    assert built["plain"] is new[0] and built["nested"][0] is new[1] and built["nested"][1] == (new[0], None, "word")
    assert built["cache"].layers[0]["keys"] is new[2] and built["cache"].layers[0]["size"] == 3
    assert value["cache"].layers[0]["keys"] is c, "the script's own result is left alone"


def test_a_model_output_is_made_by_its_class() -> None:
    built = read(Result(loss=torch.zeros(()))).build([torch.ones(())])
    assert isinstance(built, Result) and built.loss.item() == 1 and built["loss"] is built.loss


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: Any = torch.zeros(())
    for _ in range(12):
        value = [value]
    with pytest.raises(CannotRepeat, match="nested"):
        read(value)


def test_tensors_are_found_once() -> None:
    tensor, found = torch.zeros(2), []
    tensors_within([tensor, {"again": tensor}, Cache(tensor)], torch.Tensor, found, 6)
    assert len(found) == 1

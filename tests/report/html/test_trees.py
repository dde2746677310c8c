"""Trees sum to the peak at every level, and stay small."""

from collections.abc import Iterator
from typing import Any

import pytest

from support import MIB, Run, training_run
from tonnage.ledger import Category
from tonnage.report.html import trees
from tonnage.report.html.trees import by_line, by_module, tree_of


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for branch in tree.get("branches", ()):
        yield from nodes(branch)


@pytest.mark.parametrize("path_of", [by_module, by_line])
@pytest.mark.parametrize("layers", [4, 400])
def test_branches_sum_to_what_they_branch_from(path_of, layers: int) -> None:
    recording = training_run(layers=layers)
    tree = tree_of(recording.live_at_peak, path_of, "all")
    assert tree["bytes"] == recording.peak_allocated_bytes
    assert tree["count"] == len(recording.live_at_peak)
    for node in nodes(tree):
        if "branches" in node:
            assert sum(branch["bytes"] for branch in node["branches"]) == node["bytes"]
            assert sum(branch["count"] for branch in node["branches"]) == node["count"]
            assert len(node["branches"]) <= trees.MOST_BRANCHES + 1


def test_modules_nest_and_layers_stand_in_order() -> None:
    tree = tree_of(training_run(layers=12).live_at_peak, by_module, "all")
    layers = next(branch for branch in tree["branches"] if branch["name"] == "layers")
    names = [branch["name"] for branch in layers["branches"]]
    assert names[:12] == [str(number) for number in range(12)]
    assert layers["branches"][0]["branches"][0]["name"] == "mlp"


def test_what_has_no_module_is_under_its_category() -> None:
    run = Run()
    run.alloc(MIB, Category.ACTIVATIONS, operator="aten::mm", shape=(4, 4))
    tree = tree_of(run.recording.live_at_peak, by_module, "all")
    assert tree["branches"][0]["name"] == "activations, no module"
    assert tree["branches"][0]["branches"][0]["name"] == "mm [4, 4]"


def test_lines_nest_as_calls_do_outermost_first() -> None:
    run = Run()
    run.alloc(MIB, stack=("model.py:12", "train.py:88"), line="model.py:12")
    run.alloc(MIB, line="train.py:90")
    run.alloc(MIB)
    tree = tree_of(run.recording.live_at_peak, by_line, "all")
    assert {branch["name"] for branch in tree["branches"]} == {"train.py:88", "train.py:90", "no line recorded"}
    outer = next(branch for branch in tree["branches"] if branch["name"] == "train.py:88")
    assert outer["branches"][0]["name"] == "model.py:12"


def test_a_stack_without_end_is_cut() -> None:
    run = Run()
    run.alloc(MIB, stack=tuple(f"deep.py:{line}" for line in range(900)))
    assert len(list(nodes(tree_of(run.recording.live_at_peak, by_line, "all")))) == trees.DEEPEST + 1


def test_nothing_is_a_tree_of_nothing() -> None:
    assert tree_of([], by_module, "all") == {"name": "all", "bytes": 0, "count": 0, "category": "other"}

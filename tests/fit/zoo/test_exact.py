"""Trainings as people have them: a technique leaves their ten steps as they are, or refuses and leaves no trace.

`python tests/fit/zoo/report.py` shows all of it as a table.
"""

import os
from typing import Any

import pytest

from fit.zoo.trainings import KINDS
from fit.zoo.trial import COLUMNS, TOGETHER, outcome, repeated

pytestmark = pytest.mark.filterwarnings("ignore")  # trainings as people have them warn as theirs do

# What people train most may not be refused what makes it fit: a fit that refuses everything is exact, too.
_LARGE = ("two micro-batches", "row by row", "recompute", "chunked-loss", "step-in-backward", "host-states", "together")
_DRAWING = ("recompute", "step-in-backward", "host-states")
_CLASSIFYING = ("two micro-batches", "row by row", "recompute", "step-in-backward", "host-states")
_USABLE: dict[str, tuple[str, ...]] = {
    "llama": _LARGE,
    "mistral with a window": _LARGE,
    "qwen3": _LARGE,
    "gpt2 without dropout": _LARGE,
    "gemma 3": _LARGE,
    "lora through peft": _LARGE,
    "trainer with num items in batch": _LARGE,
    "gpt2": _DRAWING,
    "dropout modules": _DRAWING,
    "vit": _CLASSIFYING,
    "plain cross entropy": _CLASSIFYING,
    "a batch without ragged rows": _LARGE,
    "regression": _CLASSIFYING,
    "groups without decay": _CLASSIFYING,
    "cosine schedule made before fit": _CLASSIFYING,
    "clipped gradients": ("two micro-batches", "row by row", "recompute", "host-states"),
    "resnet with batch norm": ("step-in-backward", "host-states"),
}
_ALIKE = ("mistral with a window", "qwen3", "groups without decay")  # to a technique: llama, and plain cross entropy
USABLE = [
    pytest.param(kind, column, marks=pytest.mark.slow if kind in _ALIKE else ())
    for kind, columns in _USABLE.items()
    for column in columns
]


# What is not right yet, and why. A cell that becomes right must leave this list.
_BRANCHES = "which way the forward pass goes depends on the mean of the batch, and parts have means of their own"
_KNOWN = {
    ("rows with an early exit", "row by row"): _BRANCHES,
    ("gradient penalty", "tiled-mlp"): "tiles have no second derivative, which shows in the first step only",
    ("queue of negatives", "weight-streaming"): "the forward pass writes into parameters that are on their way",
    ("average by a deep copy after fit", "weight-streaming"): "a copy has no streams of its own",
    ("whole model saved after fit", "weight-streaming"): "its hooks cannot be pickled",
}
# All columns take minutes. Those that a budget chooses most are tested with every kind: with what people train most always, and
# with each other kind one now and the other one slowly. Several techniques together are tested with what people train most,
# slowly with every third other kind. All of it is tested with TONNAGE_ZOO=all.
_OFTEN = ("two micro-batches", "recompute")


def _marks(number: int, kind: str, column: str) -> Any:
    return () if kind in _USABLE or column == _OFTEN[number % 2] else pytest.mark.slow


_TESTED = [
    pytest.param(kind, column, marks=_marks(number, kind, column))
    for number, kind in enumerate(KINDS)
    for column in COLUMNS
    if os.environ.get("TONNAGE_ZOO") == "all" or column in _OFTEN or (column == TOGETHER and number % 3 == 0)
]


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_training_repeats_itself(kind: str) -> None:
    """Else the zoo itself would be what is not exact: no technique would be, either."""
    assert str(repeated(kind)) == "exact"


@pytest.mark.parametrize(("kind", "column"), _TESTED)
def test_ten_steps_are_exact_or_refused_without_a_trace(kind: str, column: str) -> None:
    found = outcome(kind, column)
    assert found.good is ((kind, column) not in _KNOWN), str(found)


@pytest.mark.parametrize(("kind", "column"), USABLE)
def test_what_people_train_most_is_not_refused(kind: str, column: str) -> None:
    assert str(outcome(kind, column)) == "exact"

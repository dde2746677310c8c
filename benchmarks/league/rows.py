"""What a source of the league is made of: runs that others measured, and what each predictor says of them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# What was read: the allocator's two counters, or the whole process as the driver sees it (NVML, nvidia-smi).
Meter = Literal["allocated", "reserved", "process"]


# The reason of a predictor that was asked about a sample of the rows alone.
NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Row:
    """A published run: what it was, where it ran, and how much memory it took or whether it fitted."""

    name: str  # one of its source's
    card: str  # a key of the catalogue
    torch: str  # "2.6"; empty where nobody said
    case: Mapping[str, Any]  # what a predictor has to know
    meter: Meter = "allocated"
    measured: int | None = None  # bytes; None where only the verdict was published
    resolution: int = 0  # half of the last digit that was printed, in bytes: less than that is no error
    fits: bool | None = None
    rivals: Mapping[str, int] = field(default_factory=dict)  # predictions that were published beside it, in bytes


@dataclass(frozen=True)
class Prediction:
    """What a predictor says of a row; `refused` has the reason where it says nothing."""

    predicted: int | None = None
    fits: bool | None = None
    refused: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Reading:
    """The rows of a source that can be run here, and how many cannot, by reason."""

    rows: Sequence[Row]
    left_out: Counter[str]


@dataclass(frozen=True)
class Source:
    """One publisher of measured runs."""

    key: str
    title: str
    where: str  # repository, path and commit
    read: Callable[[], Reading]
    predict: Callable[[Row], Prediction]
    # Other predictors that are run here, by name; published predictions are in the rows.
    rivals: Mapping[str, Callable[[Row], Prediction]] = field(default_factory=dict)
    # Rows whose library computes for minutes on the host before anything is on the card: no sample to check has them.
    slow: Callable[[Row], bool] = lambda row: False


def sample(rows: Sequence[Row], count: int, seed: int = 20) -> list[Row]:
    """The same rows in every run, in their order."""
    kept = set(random.Random(seed).sample(range(len(rows)), min(count, len(rows))))
    return [row for number, row in enumerate(rows) if number in kept]

"""What a model is trained for: how many sequences a sample has, which frozen model reads them too, what becomes of the logits.

The rows are data (`data/objectives.toml`). `moments` knows when the bytes are alive, `step_time` what the passes take.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tonnage.budget.adapters import Base
from tonnage.models.shape import ModelShape

_DATA = Path(__file__).parent / "data" / "objectives.toml"

# How the reference of a preference is had: another copy of the model; the model itself without its adapters; or not at all,
# for what it says of every sample was computed before.
Reference = Literal["copy", "adapters-off", "precomputed"]
Scores = Literal["next-token", "log-probabilities", "odds", "divergence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One row of the data, with what was asked for beside it."""

    name: str
    sample: str
    sequences: int
    scores: Scores
    copies: int = 0
    reference: bool = False
    own: int = 0
    frozen: int = 0
    how: Reference | None = None  # where there is a reference
    teacher: ModelShape | None = None
    teacher_base: Base = "16-bit"
    grad_cache: bool = False

    @property
    def plain(self) -> bool:
        """Next tokens, by every framework and in every layout."""
        return self.scores == "next-token"

    @property
    def has_logits(self) -> bool:
        """The model ends in scores over the vocabulary."""
        return self.scores != "none"

    @property
    def frozen_passes(self) -> int:
        """Forward passes of a frozen model for every pass of the trained one."""
        return 0 if self.how == "precomputed" else self.frozen

    @property
    def own_passes(self) -> int:
        """Forward passes of the trained model without gradients: GradCache makes all vectors first."""
        return self.own + self.grad_cache

    @property
    def holds_frozen(self) -> bool:
        """Weights of a frozen model are in memory beside the trained ones."""
        return self.teacher is not None or self.how == "copy"

    @property
    def sees_whole_batch(self) -> bool:
        """The samples of a batch are each other's negatives, so that one pass must see all of them."""
        return self.name == "contrastive" and not self.grad_cache

    @property
    def in_pass(self) -> int:
        """Sequences of one sample in a pass: GradCache takes the texts of a pair one by one."""
        return 1 if self.grad_cache else self.sequences

    @property
    def texts(self) -> int:
        """Parts of a pass that go through the model one after the other: encoders of pairs take each side by itself."""
        return self.in_pass if self.name == "contrastive" else 1

    @property
    def frozen_name(self) -> str:
        """What the frozen model is called."""
        return "teacher" if self.name == "distill" else "reference"

    def trained(self, shape: ModelShape) -> ModelShape:
        """The model with the end that it is trained with: no head where there are no scores over the vocabulary."""
        if self.has_logits:
            return shape
        end = 0 if self.name == "contrastive" else shape.hidden
        other = shape.other_parameters + end
        return replace(shape, head_parameters=0, tied=False, logits=False, other_parameters=other)

    def frozen_shape(self, shape: ModelShape) -> ModelShape:
        """The frozen model: a teacher, or the trained one as it was."""
        return self.teacher or shape


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_DATA.read_text("utf-8"))


def objective_names() -> tuple[str, ...]:
    """All that there are."""
    return tuple(_rows())


def objective_of(name: str, **asked: Any) -> Objective:
    """The objective of that name."""
    return Objective(name=name, **_rows()[name] | asked)


NEXT_TOKEN = objective_of("next-token")

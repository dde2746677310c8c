"""Training objectives: sequences per sample, the frozen model that also reads them, and what the loss does with logits.

The rows are data (`data/objectives.toml`). `moments` knows when the bytes are alive, `step_time` what the passes cost.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from tonnage.budget import table
from tonnage.budget.training.adapters import Base
from tonnage.models.shape import ModelShape

# How the reference log-probabilities are obtained: from a copy of the model, from the model with adapters off, or
# precomputed.
Reference = Literal["copy", "adapters-off", "precomputed"]
Scores = Literal["next-token", "log-probabilities", "odds", "divergence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One row of the data, with the requested options."""

    name: str
    sample: str
    sequences: int
    scores: Scores
    copies: int = 0
    reference: bool = False
    own: int = 0
    frozen: int = 0
    how: Reference | None = None  # if there is a reference
    teacher: ModelShape | None = None
    teacher_base: Base = "16-bit"
    grad_cache: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is next-token prediction, which every framework and layout supports."""
        return self.scores == "next-token"

    @property
    def has_logits(self) -> bool:
        """Whether the model ends in scores over the vocabulary."""
        return self.scores != "none"

    @property
    def frozen_passes(self) -> int:
        """Forward passes of a frozen model per pass of the trained one."""
        return 0 if self.how == "precomputed" else self.frozen

    @property
    def holds_frozen(self) -> bool:
        """Whether a frozen model's weights are in memory beside the trained ones."""
        return self.teacher is not None or self.how == "copy"

    @property
    def sees_whole_batch(self) -> bool:
        """Whether one pass must see the whole batch, since its samples are each other's negatives."""
        return self.name == "contrastive" and not self.grad_cache

    @property
    def in_pass(self) -> int:
        """Sequences per sample in a pass: GradCache takes the texts of a pair one by one."""
        return 1 if self.grad_cache else self.sequences

    @property
    def texts(self) -> int:
        """Parts of a pass that run one after another: encoders of pairs take each side separately."""
        return self.in_pass if self.name == "contrastive" else 1

    @property
    def frozen_name(self) -> str:
        """Name of the frozen model."""
        return "teacher" if self.name == "distill" else "reference"

    def trained(self, shape: ModelShape) -> ModelShape:
        """Return the model with its training head: none without scores over the vocabulary."""
        if self.has_logits:
            return shape
        other = shape.other_parameters + (0 if self.name == "contrastive" else shape.hidden)
        return replace(shape, head_parameters=0, tied=False, logits=False, other_parameters=other)


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives."""
    return tuple(table("objectives"))


def objective_of(name: str, **asked: Any) -> Objective:
    """Return the objective of that name."""
    return Objective(name=name, **table("objectives")[name] | asked)


NEXT_TOKEN = objective_of("next-token")

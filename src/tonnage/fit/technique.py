"""What a technique is: one way to spend less GPU memory, usable alone, that can be undone.

    technique = ChunkedLoss(chunk_rows=1024)
    undo = technique.apply(training)
    ...
    undo()

A technique is a frozen dataclass: its fields are its settings, plain data that JSON can hold. It does not know the
solver, nor which other techniques are in place beyond those it names in `conflicts`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from tonnage.errors import TonnageError
from tonnage.fit.measure.profile import Profile
from tonnage.fit.training import Training, Undo


class Changes(Enum):
    """What a technique does to the numbers of training."""

    NOTHING = "nothing"  # gradients equal up to the rounding of a reordered sum
    ROUNDING = "rounding"  # gradients equal up to the rounding of a narrower type; FP32 stays the truth
    NUMERICS = "numerics"  # what is stored is coarser: opt in


class NotApplicable(TonnageError, ValueError):
    """A technique that this model, optimizer or machine cannot use; the sentence says why."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a technique is expected to save and to cost in one optimizer step."""

    saved_bytes: int  # of the GPU's peak; negative where it costs memory
    seconds: float  # added to a step; negative where it saves time
    host_bytes: int = 0
    pinned_bytes: int = 0
    why: str = ""  # the arithmetic in a few words, with its numbers


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    name: ClassVar[str]  # "chunked-loss": what people type
    title: ClassVar[str]  # "loss in chunks": what a table shows
    changes: ClassVar[Changes] = Changes.NOTHING
    # Techniques are applied from low to high: what runs inside a block first, what wraps the step last.
    order: ClassVar[int]
    # The names of techniques that it cannot stand beside, each with the reason.
    conflicts: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def why_not(self, training: Training) -> str | None:
        """Why this training cannot use it, or None. Changes nothing."""

    @abstractmethod
    def estimate(self, profile: Profile) -> Estimate:
        """Saving and cost by arithmetic over what was profiled."""

    @abstractmethod
    def apply(self, training: Training) -> Undo:
        """Put it in place; what is returned takes it away. Raises NotApplicable and then has changed nothing."""

    def settings(self) -> dict[str, Any]:
        """Its fields, as JSON holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

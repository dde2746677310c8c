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
from contextlib import ExitStack
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from tonnage.errors import TonnageError
from tonnage.fit.training import Training, Undo


class Changes(Enum):
    """What a technique does to the numbers of training."""

    NOTHING = "nothing"  # gradients equal up to the rounding of a reordered sum
    ROUNDING = "rounding"  # gradients equal up to the rounding of a narrower type; FP32 stays the truth
    NUMERICS = "numerics"  # what is stored is coarser: opt in


class NotApplicable(TonnageError, ValueError):
    """A technique that this model, optimizer or machine cannot use; the sentence says why."""


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    name: ClassVar[str]  # "chunked-loss": what people type
    title: ClassVar[str]  # "loss in chunks": what a table shows
    changes: ClassVar[Changes] = Changes.NOTHING
    # Techniques are applied from low to high: what runs inside a block first, what wraps the step last.
    order: ClassVar[int]
    # The names of techniques that it cannot stand beside, each with the reason.
    conflicts: ClassVar[Mapping[str, str]] = {}
    refusal: ClassVar[str] = "{reason}"  # the error where it cannot be used; it may name settings: "{technique.dtype}"
    hint: ClassVar[str] = "Leave it out."

    @abstractmethod
    def why_not(self, training: Training) -> str | None:
        """Why this training cannot use it, or None. Changes nothing."""

    @abstractmethod
    def place(self, training: Training, stack: ExitStack) -> None:
        """Change the training, which can use it; each change puts its undoing on the stack."""

    def apply(self, training: Training) -> Undo:
        """Put it in place; what is returned takes it away. Raises NotApplicable and then has changed nothing."""
        reason = self.why_not(training)
        if reason is not None:
            raise NotApplicable(self.refusal.format(reason=reason, technique=self), hint=self.hint)
        with ExitStack() as stack:
            self.place(training, stack)
            return stack.pop_all().close

    def settings(self) -> dict[str, Any]:
        """Its fields, as JSON holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

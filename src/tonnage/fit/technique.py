"""The interface of a technique: one way to use less GPU memory, usable alone, that can be undone.

    technique = ChunkedLoss(chunk_rows=1024)
    undo = technique.apply(training)
    ...
    undo()

A technique is a frozen dataclass: its fields are its settings, plain data for JSON. What is said about it, such as its
title and its conflicts, stands in tonnage/techniques.toml. It does not know the solver, or other techniques beyond
those in `conflicts`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from enum import Enum
from importlib import import_module
from itertools import permutations
from typing import Any, ClassVar, dataclass_transform

from tonnage.errors import RequestError, TonnageError
from tonnage.fit.training import Training, Undo
from tonnage.techniques import techniques

_FACTS = ("title", "order", "changes", "conflicts", "refusal", "hint")


class Changes(Enum):
    """What a technique does to the numerics of training."""

    NOTHING = "nothing"  # gradients equal up to the rounding of a reordered sum
    ROUNDING = "rounding"  # gradients equal up to the rounding of a narrower dtype; FP32 masters stay
    NUMERICS = "numerics"  # stored values are coarser: opt in


class NotApplicable(TonnageError, ValueError):
    """This model, optimizer or machine cannot use a technique; the message says why."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    name: ClassVar[str]  # "chunked-loss": what users type
    title: ClassVar[str]  # "loss in chunks": what tables show
    changes: ClassVar[Changes] = Changes.NOTHING
    # Techniques are applied from low to high: changes inside a block first, those around the step last.
    order: ClassVar[int]
    # Names of techniques that it cannot be combined with, and why.
    conflicts: ClassVar[Mapping[str, str]] = {}
    refusal: ClassVar[str] = "{reason}"  # error message; may name settings: "{technique.dtype}"
    hint: ClassVar[str] = "Leave it out."

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        """Make it a frozen dataclass, with the facts of this name."""
        if name is not None:
            cls.name = name
            row = techniques()[name]
            for key in row.keys() & _FACTS:
                setattr(cls, key, Changes(row[key]) if key == "changes" else row[key])
        dataclass(frozen=True, kw_only=True)(cls)

    @abstractmethod
    def why_not(self, training: Training) -> str | None:
        """Return why this training cannot use it, or None. Changes nothing."""

    @abstractmethod
    def place(self, training: Training, stack: ExitStack) -> None:
        """Change the training, which must be able to use it; each change pushes its undo on the stack."""

    def apply(self, training: Training) -> Undo:
        """Apply it and return its undo. Raises NotApplicable without having changed anything."""
        reason = self.why_not(training)
        if reason is not None:
            raise NotApplicable(self.refusal.format(reason=reason, technique=self), hint=self.hint)
        return self.place_again(training)

    def place_again(self, training: Training) -> Undo:
        """Apply it without asking whether it can be used: other techniques may have changed the answer since."""
        with ExitStack() as stack:
            self.place(training, stack)
            return stack.pop_all().close

    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_CLASSES: dict[str, str] = {name: row["class"] for name, row in techniques().items() if "class" in row}
NAMES = tuple(_CLASSES)  # without sharding, which comes with a mesh
# Used only if a plan names them, never chosen for a budget.
BY_PLAN = frozenset(name for name, row in techniques().items() if row.get("by_plan"))


def technique_class(name: str) -> type[Technique]:
    if name == "shard":
        from tonnage.fit.sharding.shard import Shard

        return Shard
    if name not in _CLASSES:
        raise RequestError(f"There is no technique {name!r}.", hint=f"Known are {', '.join(NAMES)}.")
    found: type[Technique] = getattr(import_module(f"tonnage.fit.techniques.{name.replace('-', '_')}"), _CLASSES[name])
    return found


def make(name: str, settings: dict[str, Any]) -> Technique:
    """Build a technique from its JSON settings."""
    technique = technique_class(name)
    unknown = sorted(set(settings) - set(technique.__dataclass_fields__))
    if unknown:
        raise RequestError(
            f"{name} has no setting {unknown[0]!r}.", hint="The plan may be of another version of Tonnage."
        )
    return technique(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


def find_conflict(chosen: list[Technique]) -> str | None:
    """Return why these techniques cannot be combined, or None."""
    for one, other in permutations(chosen, 2):
        if other.name in one.conflicts:
            return f"{one.title} and {other.title} cannot stand together: {one.conflicts[other.name]}"
    return None

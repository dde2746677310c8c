"""A byte count with the arithmetic behind it: what `--explain` prints and what a ledger is summed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from tonnage.ledger import Category

if TYPE_CHECKING:
    # NumPy is slow to import, and a plan of plain numbers does not need it.
    from tonnage.budget.training.configuration import Quantity


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes of one kind. `formula` refers to the names in `numbers`."""

    category: Category
    name: str
    size_bytes: Quantity
    formula: str = ""
    numbers: Mapping[str, object] = field(default_factory=dict)
    source: str = "exact count"  # or "model", "measured on an H200"


def model_term(category: Category, name: str, size_bytes: Quantity, formula: str, **numbers: object) -> Term:
    """Return a term estimated by a model of the framework instead of an exact count."""
    return Term(category, name, size_bytes, formula, numbers, "model")


def product_term(category: Category, name: str, **numbers: Any) -> Term:
    """Return a model's term that is the product of these numbers."""
    return model_term(category, name, prod(numbers.values()), " × ".join(numbers), **numbers)


def total(terms: Iterable[Term]) -> Quantity:
    """Sum the terms' bytes."""
    return sum((term.size_bytes for term in terms), start=0.0)

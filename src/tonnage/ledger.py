"""Bytes by category on one device, from a recording's peak, a plan or a probe."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Category(StrEnum):
    """What bytes are used for. The value is the key in JSON; `label` is the name in tables."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    KV_CACHE = "kv_cache"
    INPUTS = "inputs"
    OTHER = "other"
    EARLIER = "before_recording"
    CONTEXT = "context"
    FRAGMENTATION = "fragmentation"

    @property
    def label(self) -> str:
        """The name in tables."""
        return "KV cache" if self is Category.KV_CACHE else self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes by category, and whether they were predicted or measured."""

    bytes_by_category: dict[Category, int] = field(default_factory=dict)
    measured: bool = False

    @classmethod
    def of(cls, entries: Iterable[tuple[Category, int]], *, measured: bool = False) -> "Ledger":
        """Sum entries by category, in the order of `Category`."""
        totals = dict.fromkeys(Category, 0)
        for category, size_bytes in entries:
            totals[category] += size_bytes
        return cls({category: size for category, size in totals.items() if size}, measured)

    @property
    def total_bytes(self) -> int:
        """The sum of all categories."""
        return sum(self.bytes_by_category.values())

    def __getitem__(self, category: Category) -> int:
        return self.bytes_by_category.get(category, 0)

    def ranked(self) -> Iterator[tuple[Category, int]]:
        """Categories with their bytes, largest first."""
        return iter(sorted(self.bytes_by_category.items(), key=lambda item: -item[1]))

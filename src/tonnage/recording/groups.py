"""Tensors that are alike (the same in every layer) as one row. This module does not know what is worth showing."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tonnage.ledger import Category
from tonnage.recording.records import Allocation

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one kind: `count` of them, each as large as the largest."""

    each_bytes: int
    total_bytes: int
    count: int
    category: Category
    operator: str
    module: str
    line: str
    shape: tuple[int, ...] | None
    dtype: str


@lru_cache(maxsize=65536)
def module_pattern(module: str) -> str:
    """ "layers.17.mlp" → "layers.*.mlp": what the layers of a model have in common."""
    return _INDEX.sub("*", module)


def group_alike(allocations: Iterable[Allocation]) -> list[Group]:
    """Group by all but the layer's number; largest block first."""
    return [group for group, _ in alike_with_members(allocations)]


def alike_with_members(allocations: Iterable[Allocation]) -> list[tuple[Group, list[Allocation]]]:
    """The same, each with the blocks that it stands for."""
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for a in allocations:
        key = (a.category, a.operator, module_pattern(a.module), a.line, a.shape or a.block_bytes, a.dtype)
        groups.setdefault(key, []).append(a)
    rows = [(_group(members), members) for members in groups.values()]
    return sorted(rows, key=lambda row: (-row[0].each_bytes, -row[0].total_bytes))


def _group(members: list[Allocation]) -> Group:
    first = members[0]
    modules = {a.module for a in members}
    return Group(
        each_bytes=max(a.block_bytes for a in members),
        total_bytes=sum(a.block_bytes for a in members),
        count=len(members),
        category=first.category,
        operator=first.operator,
        module=first.module if len(modules) == 1 else module_pattern(first.module),
        line=first.line,
        shape=first.shape,
        dtype=first.dtype,
    )

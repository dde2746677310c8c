"""Groups tensors that are alike (the same in every layer)."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tonnage.ledger import Category
from tonnage.recording.records import Allocation

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of one kind: `count` of them, `each_bytes` and `shape` of the largest, `stack` of the first."""

    each_bytes: int
    total_bytes: int
    count: int
    category: Category
    operator: str
    module: str
    line: str
    shape: tuple[int, ...] | None
    dtype: str
    stack: tuple[str, ...] = ()
    shapes: int = 1

    @property
    def what(self) -> str:
        """The tensors in words: "48 × bfloat16 [8, 2048, 8192]", or "up to" the largest shape if they differ."""
        shape = "" if self.shape is None else f"{'up to ' * (self.shapes > 1)}{list(self.shape)}"
        count = f"{self.count:,} ×" if self.count > 1 else ""
        return " ".join(filter(None, [count, self.dtype, shape]))


@lru_cache(maxsize=65536)
def module_pattern(module: str) -> str:
    """Replace layer indices: "layers.17.mlp" becomes "layers.*.mlp"."""
    return _INDEX.sub("*", module)


def group_alike(allocations: Iterable[Allocation]) -> list[BlockGroup]:
    """Group blocks that differ only in the layer index or, in a growing KV cache, in shape. Largest total first."""
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for a in allocations:
        extent = None if a.category is Category.KV_CACHE else a.shape or a.block_bytes
        key = (a.category, a.operator, module_pattern(a.module), a.line, extent, a.dtype)
        groups.setdefault(key, []).append(a)
    found = []
    for members in groups.values():
        first, largest = members[0], max(members, key=lambda a: (a.block_bytes, a.requested_bytes))
        module = first.module if all(a.module == first.module for a in members) else module_pattern(first.module)
        total_bytes, shapes = sum(a.block_bytes for a in members), len({a.shape for a in members})
        found.append(
            BlockGroup(
                largest.block_bytes, total_bytes, len(members), first.category, first.operator, module, first.line,
                largest.shape, first.dtype, first.stack, shapes,
            )
        )  # fmt: skip
    return sorted(found, key=lambda group: (-group.total_bytes, -group.each_bytes))


def telling_lines(places: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return one line for each (line, stack): the script's own, or a telling one if others share it (`trainer.train()`).

    That is the innermost line that no other stack has, as "modeling_llama.py:254", or else that the fewest others have.
    """
    places = list(places)
    stacks: dict[str, set[tuple[str, ...]]] = {}
    for line, stack in places:
        stacks.setdefault(line, set()).add(stack)
    seen = {line: Counter(at for stack in sharing for at in set(stack)) for line, sharing in stacks.items()}
    return [
        min(stack, key=seen[line].__getitem__).rpartition("/")[2] if stack and len(stacks[line]) > 1 else line
        for line, stack in places
    ]

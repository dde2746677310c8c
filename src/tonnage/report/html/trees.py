"""The peak as a tree of bytes: by module, and by source line.

Branches too thin to see are one branch, "… 12 smaller", so a tree is bounded and still sums to the peak exactly.
It does not know how a tree is drawn.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.report.html.markup import clean

THINNEST = 1 / 1000
MOST_BRANCHES = 120
DEEPEST = 24

Path = tuple[str, ...]


@dataclass(slots=True)
class Node:
    """Bytes under one name, all of its branches included."""

    name: str
    total_bytes: int = 0
    count: int = 0
    bytes_by_category: Counter[Category] = field(default_factory=Counter)
    branches: dict[str, "Node"] = field(default_factory=dict)

    def add(self, a: Allocation) -> None:
        """Count a block."""
        self.total_bytes += a.block_bytes
        self.count += 1
        self.bytes_by_category[a.category] += a.block_bytes


def by_module(a: Allocation) -> Path:
    """Module by module down to the operator; what belongs to no module is under its category."""
    names = tuple(a.module.split(".")) if a.module else (f"{a.category.label}, no module",)
    return (*names, _operator(a))


def by_line(a: Allocation) -> Path:
    """From the outermost call to the line that allocated, then the operator."""
    calls = tuple(reversed(a.stack)) or (a.line or "no line recorded",)
    return (*calls, _operator(a))


def _operator(a: Allocation) -> str:
    shape = "" if a.shape is None else f" {list(a.shape)}"
    return f"{a.operator.removeprefix('aten::') or 'tensor'}{shape}"


def tree_of(allocations: Iterable[Allocation], path_of: Callable[[Allocation], Path], name: str) -> dict[str, object]:
    """The tree as the page reads it: name, bytes, count, main category, branches."""
    root = Node(name)
    for a in allocations:
        node = root
        node.add(a)
        for step in path_of(a)[:DEEPEST]:
            node = node.branches.setdefault(step, Node(step))
            node.add(a)
    return _figures(root, max(1, int(root.total_bytes * THINNEST)))


def _figures(node: Node, thinnest_bytes: int) -> dict[str, object]:
    category = max(node.bytes_by_category, key=lambda c: node.bytes_by_category[c], default=Category.OTHER)
    figures: dict[str, object] = {
        "name": clean(node.name, 80),
        "bytes": node.total_bytes,
        "count": node.count,
        "category": str(category),
    }
    if node.branches:
        figures["branches"] = [_figures(branch, thinnest_bytes) for branch in _bounded(node, thinnest_bytes)]
    return figures


def _bounded(node: Node, thinnest_bytes: int) -> list[Node]:
    ranked = sorted(node.branches.values(), key=lambda branch: -branch.total_bytes)
    shown = [branch for branch in ranked[:MOST_BRANCHES] if branch.total_bytes >= thinnest_bytes]
    thin = ranked[len(shown) :]
    if len(thin) == 1:
        shown, thin = ranked, []
    if all(branch.name.isdecimal() for branch in shown):
        shown.sort(key=lambda branch: int(branch.name))
    return [*shown, _merged(thin)] if thin else shown


def _merged(thin: list[Node]) -> Node:
    rest = Node(f"… {len(thin)} smaller")
    for branch in thin:
        rest.total_bytes += branch.total_bytes
        rest.count += branch.count
        rest.bytes_by_category.update(branch.bytes_by_category)
    return rest

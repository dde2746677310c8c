"""Divide a batch into micro-batches, and weight their losses.

| weighting        | the loss is                                            | a part weighs               |
|------------------|--------------------------------------------------------|-----------------------------|
| "rows"           | a mean over rows                                       | its rows / all rows         |
| "tokens"         | a mean over labels except those at -100                | its labels / all labels     |
| "shifted-tokens" | the same over `labels[..., 1:]`: the model shifts them | its labels / all labels     |
| "nonzero:mask"   | a mean over elements where `mask` is nonzero           | its nonzeros / all nonzeros |
| "total:weights"  | a mean weighted by the tensor `weights`                | its sum / the sum of all    |
| "sum"            | a sum, or divided by a number in the batch             | 1                           |
| a function       | anything else                                          | function(part) / their sum  |

The tensor is named after the colon by its path in the nesting ("tokens:inputs.target_ids", "nonzero:1"); without a colon,
labels are found by name. "shifted-nonzero" shifts like "shifted-tokens". Weights that depend on labels stay on the labels'
device, so nothing here waits for it. This module does not know how a loss is computed or used.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from tonnage.errors import RequestError
from tonnage.fit.training import Batch

Weighting = str | Callable[[Batch], float | Tensor]
Node = TypeVar("Node")

IGNORED_LABEL = -100
WEIGHTINGS = ("rows", "tokens", "shifted-tokens", "sum")
LABEL_NAMES = ("labels", "label", "targets", "target", "y")


class BadBatch(RequestError, ValueError):
    """Raised if a batch has no tensor with rows, or lacks what its weighting needs."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and its share of the total loss."""

    batch: Batch
    weight: float | Tensor

    def weigh(self, loss: Tensor) -> Tensor:
        """Return this part's contribution to the total loss. A mean over no labels is NaN and contributes nothing."""
        if isinstance(self.weight, float):
            return loss * self.weight
        return torch.where(self.weight == 0, torch.zeros_like(loss), loss * self.weight.to(loss))


def row_slices(rows: int, slices: int) -> list[slice]:
    """Return slices of nearly equal size, the longer ones first, none empty."""
    count = min(rows, slices)
    size, longer = divmod(rows, count or 1)
    return [slice(*edges) for edges in pairwise(size * index + min(index, longer) for index in range(count + 1))]


def split(batch: Batch, parts: int, weighting: Weighting = "rows") -> list[MicroBatch]:
    """Split the batch into `parts` micro-batches of nearly equal size, at most one per row.

    Tensors are views. All parts share those without the batch dimension, and anything that is not a tensor.
    """
    rows = batch_rows(batch)
    parts = min(parts, rows)
    bounds = [rows * part // parts for part in range(parts + 1)]
    batches = [take_rows(batch, slice(start, end)) for start, end in pairwise(bounds)]
    if weighting == "sum" or parts == 1:
        return [MicroBatch(part, 1.0) for part in batches]
    measure = measure_of(weighting)
    amounts = [measure(part) for part in batches]
    total = sum(amounts)
    return [MicroBatch(part, amount / total) for part, amount in zip(batches, amounts, strict=True)]


def batch_rows(batch: Batch) -> int:
    """Return the batch size: the most common first dimension; on a tie, that of the first tensor."""
    sizes = Counter(tensor.shape[0] for tensor in tensors(batch) if tensor.ndim)
    if not sizes or not sizes.most_common(1)[0][0]:
        raise BadBatch(
            f"The batch ({type(batch).__name__}) holds no tensor with rows, so it cannot be divided.",
            hint="Give tensors, or a mapping, tuple, list or dataclass of them, with the batch as first dimension.",
        )
    return sizes.most_common(1)[0][0]


def take_rows(batch: Node, rows: slice | list[int]) -> Node:
    """Return these rows of each tensor whose first dimension is the batch; the rest is unchanged."""
    size = batch_rows(batch)

    def take_entries(entries: list[Any]) -> list[Any]:
        if len(entries) != size:  # not one entry per row (texts, file names, sizes)
            return entries
        return entries[rows] if isinstance(rows, slice) else [entries[row] for row in rows]

    taken: Node = _rebuild(batch, lambda t: t[rows] if t.ndim and t.shape[0] == size else t, take_entries)
    return taken


def change_tensors(batch: Node, change: Callable[[Tensor], Tensor]) -> Node:
    """Return the same nesting with `change` applied to each tensor."""
    changed: Node = _rebuild(batch, change)
    return changed


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor of the nesting, in order."""
    return (tensor for _, tensor in named_tensors(batch))


def find_labels(batch: Batch) -> Tensor | None:
    """Return the integer target tensor of the loss: by name, or the last of a tuple or list."""
    children = _children(batch)
    named = [children[name] for name in LABEL_NAMES if name in children]
    if not named and isinstance(batch, Sequence) and len(children) > 1:
        named = [list(children.values())[-1]]
    labels = named[0] if named else None
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, Mapping):
        return node
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {}


def _rebuild(
    node: Any, change: Callable[[Tensor], Tensor], change_list: Callable[[list[Any]], list[Any]] = lambda x: x
) -> Any:
    """Return the same nesting with its tensors changed; mappings keep their class (BatchEncoding).

    `change_list` is applied to lists that hold no tensor at any depth.
    """
    if isinstance(node, Tensor):
        return change(node)
    if isinstance(node, list) and next(tensors(node), None) is None:
        return change_list(node)
    children = {name: _rebuild(child, change, change_list) for name, child in _children(node).items()}
    if not children:
        return node
    if isinstance(node, Mapping):
        rebuilt = copy.copy(node) if isinstance(node, MutableMapping) else {}
        rebuilt.update(children)
        return rebuilt
    if isinstance(node, list):
        return list(children.values())
    if isinstance(node, tuple):
        return type(node)(*children.values()) if hasattr(node, "_fields") else tuple(children.values())
    return dataclasses.replace(node, **children)


def measure_of(weighting: Weighting) -> Callable[[Batch], float | Tensor]:
    """Return a function that gives a part's unnormalized weight."""
    if not isinstance(weighting, str):
        return weighting
    kind, _, path = weighting.partition(":")
    if kind == "rows":
        return lambda part: float(batch_rows(part))
    count = _COUNTS[kind.removeprefix("shifted-")]

    def measure(part: Batch) -> Tensor:
        tensor = named_tensor(part, path) if path else find_labels(part)
        if tensor is None:
            raise BadBatch(
                f"Weights by tokens need integer labels in the batch; it holds none named {', '.join(LABEL_NAMES)}.",
                hint='Use weighting="rows", name the tensor ("tokens:targets"), or give a function that says what a part weighs.',
            )
        return count(tensor[..., 1:] if kind.startswith("shifted-") else tensor).double()

    return measure


_COUNTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tokens": lambda tensor: (tensor != IGNORED_LABEL).sum(),
    "nonzero": lambda tensor: (tensor != 0).sum(),
    "total": lambda tensor: tensor.double().sum(),
}


def is_weighting(weighting: Weighting) -> bool:
    """Return whether it is a function or a known word."""
    if not isinstance(weighting, str):
        return callable(weighting)
    kind, _, path = weighting.partition(":")
    return weighting in WEIGHTINGS or (bool(path) and kind.removeprefix("shifted-") in _COUNTS)


def named_tensor(batch: Batch, path: str) -> Tensor:
    """Return the tensor at this path; raises BadBatch if there is none."""
    found = dict(named_tensors(batch))
    if path not in found:
        raise BadBatch(
            f"The weights of parts are counted in the tensor {path!r}, and the batch holds none of that name.",
            hint=f"It holds {', '.join(found) or 'no tensor'}: name one of these, or leave weighting= out.",
        )
    return found[path]


def named_tensors(batch: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path in the nesting ("inputs.target_ids"); a bare tensor is "batch"."""
    if isinstance(batch, Tensor):
        yield path or "batch", batch
    for name, child in _children(batch).items():
        yield from named_tensors(child, f"{path}.{name}" if path else str(name))

"""How a batch is divided into micro-batches, and how much each one's loss weighs in the whole.

| weighting        | the loss is                                             | a part weighs              |
|------------------|---------------------------------------------------------|----------------------------|
| "rows"           | a mean over rows                                        | its rows / all rows        |
| "tokens"         | a mean over labels, those at -100 left out              | its labels / all labels    |
| "shifted-tokens" | the same over `labels[..., 1:]`: the model shifts them  | its labels / all labels    |
| "sum"            | a sum, or divided by a number that comes with the batch | 1                          |
| a function       | anything else                                           | function(part) / their sum |

Weights that depend on labels stay on the labels' device: nothing here waits for it. This module does not know how a
loss is made nor what is done with it.
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
LABEL_NAMES = ("labels", "label", "targets", "target", "y")


class BadBatch(RequestError, ValueError):
    """A batch that holds no tensor with rows, or a weighting that it has nothing for."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A micro-batch, and its share of the whole loss."""

    batch: Batch
    weight: float | Tensor

    def weigh(self, loss: Tensor) -> Tensor:
        """What this part adds to the whole loss. A mean over no labels is NaN, and adds nothing."""
        if isinstance(self.weight, float):
            return loss * self.weight
        return torch.where(self.weight == 0, torch.zeros_like(loss), loss * self.weight.to(loss))


def split(batch: Batch, parts: int, weighting: Weighting = "rows") -> list[Part]:
    """The batch in `parts` micro-batches as even as can be, or in as many as it has rows.

    Tensors are views. Those whose first dimension is not the batch's, and what is no tensor, are shared by all parts.
    """
    rows = batch_rows(batch)
    parts = min(parts, rows)
    bounds = [rows * part // parts for part in range(parts + 1)]
    batches = [take_rows(batch, slice(start, end)) for start, end in pairwise(bounds)]
    return [Part(part, weight) for part, weight in zip(batches, _weights(batches, weighting), strict=True)]


def _weights(parts: Sequence[Batch], weighting: Weighting) -> list[float | Tensor]:
    if weighting == "sum" or len(parts) == 1:
        return [1.0 for _ in parts]
    measure = MEASURES[weighting] if isinstance(weighting, str) else weighting
    amounts = [measure(part) for part in parts]
    total = sum(amounts)
    return [amount / total for amount in amounts]


def batch_rows(batch: Batch) -> int:
    """The size of the batch dimension: the first one of most tensors, and among equals of the first tensor."""
    sizes = Counter(tensor.shape[0] for tensor in tensors(batch) if tensor.ndim)
    if not sizes or not sizes.most_common(1)[0][0]:
        raise BadBatch(
            f"The batch ({type(batch).__name__}) holds no tensor with rows, so it cannot be divided.",
            hint="Give tensors, or a mapping, tuple, list or dataclass of them, with the batch as first dimension.",
        )
    return sizes.most_common(1)[0][0]


def take_rows(batch: Node, rows: slice | list[int]) -> Node:
    """These rows of each tensor that has the batch as first dimension; the rest as it is."""
    size = batch_rows(batch)
    return _rebuild(batch, lambda tensor: tensor[rows] if tensor.ndim and tensor.shape[0] == size else tensor)


def change_tensors(batch: Node, change: Callable[[Tensor], Tensor]) -> Node:
    """The same nesting with each tensor replaced by what `change` makes of it."""
    return _rebuild(batch, change)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of the nesting, in order."""
    if isinstance(batch, Tensor):
        yield batch
    for child in _children(batch).values():
        yield from tensors(child)


def find_labels(batch: Batch) -> Tensor | None:
    """The integer tensor that the loss compares with: by its name, or the last of a tuple or list."""
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


def _rebuild(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with its tensors changed; mappings keep their class (BatchEncoding)."""
    if isinstance(node, Tensor):
        return change(node)
    children = {name: _rebuild(child, change) for name, child in _children(node).items()}
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


def _rows(part: Batch) -> float:
    return float(batch_rows(part))


def _tokens(part: Batch) -> Tensor:
    return (_labels_of(part) != IGNORED_LABEL).sum().double()


def _shifted_tokens(part: Batch) -> Tensor:
    return (_labels_of(part)[..., 1:] != IGNORED_LABEL).sum().double()


def _labels_of(part: Batch) -> Tensor:
    labels = find_labels(part)
    if labels is None:
        raise BadBatch(
            f"Weights by tokens need integer labels in the batch; it holds none named {', '.join(LABEL_NAMES)}.",
            hint='Use weighting="rows", or a function that says how much a part of the batch weighs.',
        )
    return labels


MEASURES: Mapping[str, Callable[[Batch], float | Tensor]] = {
    "rows": _rows,
    "tokens": _tokens,
    "shifted-tokens": _shifted_tokens,
}
WEIGHTINGS = (*MEASURES, "sum")

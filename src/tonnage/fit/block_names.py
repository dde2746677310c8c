"""Blocks that were named for a technique: whether the model has them and each stands for itself."""

from itertools import pairwise

from torch import nn


def why_not_blocks(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """What is wrong with these names, or None."""
    if not names:
        return "no block was named"
    modules = dict(model.named_modules())
    unknown = next((name for name in names if name not in modules), None)
    if unknown is not None:
        return f"the model has no block {unknown!r}"
    return _why_nested(names)


def _why_nested(names: tuple[str, ...]) -> str | None:
    ordered = sorted(f"{name}." for name in names)
    for outer, inner in pairwise(ordered):
        if inner == outer:
            return f"the block {inner[:-1]!r} was named twice"
        if inner.startswith(outer):
            return f"the block {inner[:-1]!r} is inside {outer[:-1]!r}"
    return None

"""The kinds of kernels: each module turns calls of its operators into launches, and launches into seconds on a GPU."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from tonnage.clock.kernels import (
    attention,
    convolution,
    copies,
    elementwise,
    fused,
    indexing,
    matmul,
    memory,
    optimizers,
    recurrent,
    reductions,
    rows,
)
from tonnage.clock.kernels.figures import distinct
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import Gpu

_BY_KIND = {
    "matmul": matmul, "attention": attention, "convolution": convolution, "recurrent": recurrent,
    "elementwise": elementwise, "reduction": reductions, "norm": rows, "loss": rows, "indexing": indexing,
    "sorting": indexing, "optimizer": optimizers, "copy": copies, "fused": fused,
}  # fmt: skip
# Operators that call the one with their kernel; they count only if nothing inside them was recorded.
_WHEN_ALONE = elementwise.WHEN_ALONE | indexing.WHEN_ALONE
_READERS: dict[str, Callable[[OperatorCall, Settings], Launch | None]] = {
    name: read for module in _BY_KIND.values() for name, read in module.OPERATORS.items()
} | _WHEN_ALONE

# Kinds whose time is not a formula: array sizes are evaluated one by one.
_ONE_BY_ONE = frozenset(("attention", "reduction", "norm", "loss", "indexing"))


def is_done_within(name: str, inner: Collection[str]) -> bool:
    """Say whether an operator launches nothing itself, because the operators it called do."""
    if name in inner:
        return True  # autocast calls it again
    if name in attention.OPERATORS:
        return any(other in attention.OPERATORS for other in inner)
    return bool(inner) and (name not in _READERS or name in _WHEN_ALONE)


@lru_cache(maxsize=1 << 14)
def launch_of(call: OperatorCall, settings: Settings) -> Launch | None:
    """Return what a call launches on the GPU; None if nothing, or if the operators it calls do."""
    if call.name.startswith(fused.PREFIX):
        return fused.fused(call, settings)
    try:
        return _READERS.get(call.name, memory.fallback)(call, settings)
    except (IndexError, TypeError, ValueError, KeyError):
        return memory.fallback(call, settings)  # arguments of another version's operator


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the seconds it runs on an otherwise idle GPU; an array if its sizes are arrays."""
    module = _BY_KIND.get(launch.kind, memory)
    if launch.kind not in _ONE_BY_ONE or not any(
        isinstance(size, np.ndarray) for size in (*launch.shape, launch.moved_bytes)
    ):
        return module.seconds(launch, gpu)
    # Each distinct launch once.
    columns = np.broadcast_arrays(*launch.shape, launch.moved_bytes, launch.operations, launch.kernels)
    first, places = distinct(columns)
    found = []
    for *shape, moved, operations, count in np.stack(columns, axis=-1)[first].tolist():
        sizes = tuple(map(round, shape))
        one = replace(launch, shape=sizes, moved_bytes=moved, operations=operations, kernels=round(count), stream=0)
        found.append(module.seconds(one, gpu))
    return np.array(found)[places]

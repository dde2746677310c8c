"""The kinds of kernels: each module turns calls of its operators into launches, and launches into seconds on a card."""

from collections.abc import Callable, Collection
from functools import lru_cache

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
from tonnage.clock.launch import Launch
from tonnage.clock.operators import Call
from tonnage.clock.settings import Settings
from tonnage.hardware import Gpu

_MODULES = (
    matmul, attention, convolution, recurrent, elementwise, reductions, rows, indexing, optimizers, copies,
)  # fmt: skip
# Operators that call one which has their kernel, and count where nothing inside them was recorded.
_WHEN_ALONE = elementwise.WHEN_ALONE | indexing.WHEN_ALONE
_READERS: dict[str, Callable[[Call, Settings], Launch | None]] = {
    name: read for module in _MODULES for name, read in module.OPERATORS.items()
} | _WHEN_ALONE
_BY_KIND = {
    "matmul": matmul, "attention": attention, "convolution": convolution, "recurrent": recurrent,
    "optimizer": optimizers, "fused": fused, "copy": copies, "elementwise": elementwise, "reduction": reductions, "norm": rows,
    "loss": rows, "indexing": indexing, "sorting": indexing,
}  # fmt: skip


def is_done_within(name: str, inner: Collection[str]) -> bool:
    """Whether an operator launches nothing itself, because of what those that it called launch."""
    if name in inner:
        return True  # autocast calls it again
    if name in attention.OPERATORS:
        return any(other in attention.OPERATORS for other in inner)
    return bool(inner) and (name not in _READERS or name in _WHEN_ALONE)


@lru_cache(maxsize=1 << 14)
def launch_of(call: Call, settings: Settings) -> Launch | None:
    """What a call launches on the card; None where that is left to the operators that it calls, or nothing."""
    if call.name.startswith(fused.PREFIX):
        return fused.fused(call, settings)
    try:
        return _READERS.get(call.name, memory.fallback)(call, settings)
    except (IndexError, TypeError, ValueError, KeyError):
        return memory.fallback(call, settings)  # arguments of another version's operator


def seconds(launch: Launch, gpu: Gpu) -> float:
    """How long it runs on the card alone."""
    module = _BY_KIND.get(launch.kind)
    return module.seconds(launch, gpu) if module else memory.seconds(launch, gpu)

"""Measures the memory of each training step: the peak, categories, and growth from step to step.

On the virtual GPU every block is known, so categories are those of the step's peak, and a leak has its line. On a
real GPU the peak comes from PyTorch's counters, and parameters, gradients and states exactly from the live model and
optimizers; the rest of the peak counts as activations.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from tonnage.ledger import Category, Ledger
from tonnage.recording import Recording, SegmentEvent
from tonnage.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from tonnage.virtual.session import Session

# Growth in this many steps in a row is a leak; caches that fill once are not.
_STEPS_OF_A_LEAK = 3


@dataclass(frozen=True, slots=True)
class StepMemory:
    """One step. `leak_bytes` is what each of the last steps left behind, `leak_line` the line that allocated most of it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    ledger: Ledger
    leak_bytes: int = 0
    leak_line: str = ""

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger; the unit is in the name."""
        return {
            "memory/peak_allocated_gib": self.peak_allocated_bytes / GIB,
            "memory/peak_reserved_gib": self.peak_reserved_bytes / GIB,
            **{f"memory/{category}_gib": size / GIB for category, size in self.ledger.bytes_by_category.items()},
            "memory/leak_mib_per_step": self.leak_bytes / MIB,
        }

    @property
    def leak_words(self) -> str:
        """The leak in words; "" if there is none."""
        if not self.leak_bytes:
            return ""
        kept = f", kept from {self.leak_line}" if self.leak_line else ""
        return f"GPU memory grows by {format_bytes(self.leak_bytes)} in every step{kept}."


@dataclass
class StepMeter:
    """Measures steps between `begin` and `end`."""

    _levels: list[int] = field(default_factory=list)
    _source: "_VirtualSteps | _CudaSteps | None" = None
    _gradient_bytes: int = 0
    _begun: bool = False
    _highest: StepMemory | None = None
    _warned: bool = False

    def begin(self) -> None:
        self._source = self._source or _source()
        if self._source is not None:
            self._source.begin()
            self._begun = True

    def before_optimizer(self, model: Any) -> None:
        """Measure the gradients, when they are complete and not yet freed."""
        self._gradient_bytes = _storage_bytes(parameter.grad for parameter in model.parameters())

    def end(self, model: Any, optimizers: Iterable[Any]) -> StepMemory | None:
        """End a step and return its memory; None if there is no GPU. Warns once of growing memory."""
        if self._source is None or not self._begun:
            return None
        self._begun = False
        taken = self._source.end(model, optimizers, self._gradient_bytes)
        self._levels = [*self._levels[-_STEPS_OF_A_LEAK:], taken.allocated_bytes]
        if leak_bytes := steady_growth_bytes(self._levels):
            taken = replace(taken, leak_bytes=leak_bytes, leak_line=self._source.leaking_line())
        self._highest = larger(self._highest, taken)
        if taken.leak_words and not self._warned:
            self._warned = True
            warnings.warn(taken.leak_words, stacklevel=3)  # at the line that called the callback
        return taken

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the step with the highest peak since the last call."""
        assert self._highest is not None
        highest, self._highest = self._highest, None
        return highest.metrics()


def steady_growth_bytes(levels: list[int]) -> int:
    """Return the least that each of the last steps added, or 0 if one of them added nothing."""
    growths = [after - before for before, after in pairwise(levels[-_STEPS_OF_A_LEAK - 1 :])]
    return max(0, min(growths)) if len(growths) == _STEPS_OF_A_LEAK else 0


def larger(one: StepMemory | None, other: StepMemory) -> StepMemory:
    """Return the step with the higher peak, with the leak of the later one, for loggers that skip steps."""
    if one is None or other.peak_allocated_bytes >= one.peak_allocated_bytes:
        return other
    return replace(one, leak_bytes=other.leak_bytes, leak_line=other.leak_line)


def _source() -> "_VirtualSteps | _CudaSteps | None":
    sessions = sys.modules.get("tonnage.virtual.session")
    if sessions is not None and sessions._current is not None:
        return _VirtualSteps(sessions._current)
    return _CudaSteps() if torch.cuda.is_available() else None


class _VirtualSteps:
    """Measures steps on the virtual GPU, from all blocks since a step began and those live then."""

    def __init__(self, session: "Session") -> None:
        self._session, self._device = session, session.device
        self._starts: list[int] = []

    def begin(self) -> None:
        device = self._device
        self._starts = [*self._starts[1 - _STEPS_OF_A_LEAK :], device.sequence]
        self._alive = list(device.live.values())
        self._first = len(device.allocations)
        self._first_segment = len(device.segments)
        self._reserved_bytes = device.memory_stats()["reserved_bytes.all.current"]

    def end(self, model: Any, optimizers: Iterable[Any], gradient_bytes: int) -> StepMemory:
        # The step as its own recording, which begins with what was allocated.
        device, start = self._device, self._starts[-1]
        blocks = [
            replace(a, born=max(0, a.born - start), died=None if a.died is None else a.died - start)
            for a in (*self._alive, *device.allocations[self._first :])
        ]
        taken = [replace(s, sequence=s.sequence - start) for s in device.segments[self._first_segment :]]
        before = SegmentEvent(0, "segment_alloc", 0, self._reserved_bytes, 0)
        step = Recording(self._session.recording().header, blocks, [before, *taken])
        allocated = device.memory_stats()["allocated_bytes.all.current"]
        return StepMemory(step.peak_allocated_bytes, step.peak_reserved_bytes, allocated, step.ledger())

    def leaking_line(self) -> str:
        """Return the line that left most behind in each of the last steps, if known."""
        kept: list[Counter[str]] = []
        for start, end in pairwise((*self._starts, self._device.sequence)):
            kept.append(Counter())
            for a in self._device.live.values():
                if start < a.born <= end:
                    kept[-1][a.line] += a.block_bytes
        every = {line: min(counter[line] for counter in kept) for line in kept[0] if line}
        return max(every, key=every.__getitem__, default="") if any(every.values()) else ""


class _CudaSteps:
    """Measures steps on the real GPU, resetting PyTorch's peaks for each."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def end(self, model: Any, optimizers: Iterable[Any], gradient_bytes: int) -> StepMemory:
        peak = torch.cuda.max_memory_allocated()
        every = (state for optimizer in optimizers for state in optimizer.state.values())
        states = (state for state in every if isinstance(state, Mapping))
        held = {
            Category.PARAMETERS: _storage_bytes((*model.parameters(), *model.buffers())),
            Category.GRADIENTS: gradient_bytes,
            Category.OPTIMIZER_STATES: _storage_bytes(tensor for state in states for tensor in state.values()),
        }
        held[Category.ACTIVATIONS] = max(0, peak - sum(held.values()))
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        return StepMemory(peak, reserved, allocated, Ledger.of(held.items(), measured=True))

    def leaking_line(self) -> str:
        return ""  # unknown from counters


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes on the GPU, counting each storage once: tied weights and views share one."""
    storages = (tensor.untyped_storage() for tensor in tensors if getattr(tensor, "is_cuda", False))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

"""The memory of one training step after the other: peak, categories, and what grows from step to step.

On the virtual GPU every block is known, so the categories are those of the step's peak and a leak has its line. On a real
GPU the counters of PyTorch give the peak, and the live model and optimizers give parameters, gradients and states exactly;
what the peak holds beside them is counted as activations. It does not know whose training loop it is.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from tonnage.ledger import Category, Ledger
from tonnage.recording import Recording, SegmentEvent
from tonnage.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from tonnage.virtual.session import Session

# Growth in as many steps on end is a leak; caches that fill once are not.
_STEPS_OF_A_LEAK = 3


@dataclass(frozen=True, slots=True)
class StepMemory:
    """One step. `leak_bytes` is what every one of the last steps left behind, `leak_line` the line that made most of it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    ledger: Ledger
    leak_bytes: int = 0
    leak_line: str = ""

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger; the unit is in the name."""
        return {
            "memory/peak_allocated_gib": self.peak_allocated_bytes / GIB,
            "memory/peak_reserved_gib": self.peak_reserved_bytes / GIB,
            **{f"memory/{category}_gib": size / GIB for category, size in self.ledger.bytes_by_category.items()},
            "memory/leak_mib_per_step": self.leak_bytes / MIB,
        }

    @property
    def leak_words(self) -> str:
        """A sentence for the person who trains."""
        if not self.leak_bytes:
            return ""
        kept = f", kept from {self.leak_line}" if self.leak_line else ""
        return f"GPU memory grows by {format_bytes(self.leak_bytes)} in every step{kept}."


class _Source(Protocol):
    """One kind of GPU."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, model: Any, optimizers: Iterable[Any], gradient_bytes: int) -> StepMemory:
        """It ends."""

    def leaking_line(self) -> str:
        """The line that left most behind in each of the last steps, where it is known."""


@dataclass
class StepMeter:
    """Told where steps begin and end; answers what each took. None where there is no GPU."""

    _levels: list[int] = field(default_factory=list)
    _source: _Source | None = None
    _gradient_bytes: int = 0
    _begun: bool = False
    _highest: StepMemory | None = None
    _warned: bool = False

    def begin(self) -> None:
        """A step begins."""
        self._source = self._source or _source()
        if self._source is not None:
            self._source.begin()
            self._begun = True

    def before_optimizer(self, model: Any) -> None:
        """Gradients are complete, and not yet dropped."""
        self._gradient_bytes = _storage_bytes(parameter.grad for parameter in model.parameters())

    def end(self, model: Any, optimizers: Iterable[Any]) -> StepMemory | None:
        """A step is over."""
        if self._source is None or not self._begun:
            return None
        self._begun = False
        taken = self._source.end(model, optimizers, self._gradient_bytes)
        self._levels = [*self._levels[-_STEPS_OF_A_LEAK:], taken.allocated_bytes]
        leak_bytes = steady_growth_bytes(self._levels)
        if leak_bytes:
            taken = replace(taken, leak_bytes=leak_bytes, leak_line=self._source.leaking_line())
        self._highest = larger(self._highest, taken)
        return taken

    def warn_of_leak(self, step: StepMemory) -> None:
        """Warn once of memory that grows, in the name of whoever called the callback that calls this."""
        if step.leak_words and not self._warned:
            self._warned = True
            warnings.warn(step.leak_words, stacklevel=3)

    def take_highest(self) -> StepMemory:
        """The step with the highest peak since this was last asked for."""
        assert self._highest is not None
        highest, self._highest = self._highest, None
        return highest


def steady_growth_bytes(levels: list[int]) -> int:
    """The least that each of the last steps added, if every one of them did."""
    growths = [after - before for before, after in pairwise(levels[-_STEPS_OF_A_LEAK - 1 :])]
    return max(0, min(growths)) if len(growths) == _STEPS_OF_A_LEAK else 0


def larger(one: StepMemory | None, other: StepMemory) -> StepMemory:
    """The step with the higher peak: what a logger that is not told of every step should hear of."""
    if one is None or other.peak_allocated_bytes >= one.peak_allocated_bytes:
        return other
    return replace(one, leak_bytes=other.leak_bytes, leak_line=other.leak_line)


def _source() -> _Source | None:
    import sys

    sessions = sys.modules.get("tonnage.virtual.session")
    if sessions is not None and sessions._current is not None:
        return _VirtualSteps(sessions._current)
    import torch

    return _CudaSteps() if torch.cuda.is_available() else None


class _VirtualSteps:
    """Steps on the virtual GPU: every block since the step began, and those that were alive then."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._device = session.device
        self._starts: list[int] = []

    def begin(self) -> None:
        device = self._device
        self._starts = [*self._starts[1 - _STEPS_OF_A_LEAK :], device.sequence]
        self._alive = list(device.live.values())
        self._first = len(device.allocations)
        self._first_segment = len(device.segments)
        self._reserved_bytes = device.memory_stats()["reserved_bytes.all.current"]

    def end(self, model: Any, optimizers: Iterable[Any], gradient_bytes: int) -> StepMemory:
        step = self._window()
        allocated = self._device.memory_stats()["allocated_bytes.all.current"]
        return StepMemory(step.peak_allocated_bytes, step.peak_reserved_bytes, allocated, step.ledger())

    def _window(self) -> Recording:
        """The step as a recording of its own, which begins with what was there."""
        device, start = self._device, self._starts[-1]
        blocks = [
            replace(a, born=max(0, a.born - start), died=None if a.died is None else a.died - start)
            for a in (*self._alive, *device.allocations[self._first :])
        ]
        taken = [replace(s, sequence=s.sequence - start) for s in device.segments[self._first_segment :]]
        before = SegmentEvent(0, "segment_alloc", 0, self._reserved_bytes, 0)
        return Recording(self._session.recording().header, blocks, [before, *taken])

    def leaking_line(self) -> str:
        ends = [*self._starts[1:], self._device.sequence]
        kept = [self._kept_by_line(start, end) for start, end in zip(self._starts, ends, strict=True)]
        every = {line: min(counter[line] for counter in kept) for line in kept[0] if line}
        return max(every, key=every.__getitem__, default="") if any(every.values()) else ""

    def _kept_by_line(self, start: int, end: int) -> Counter[str]:
        lines: Counter[str] = Counter()
        for a in self._device.live.values():
            if start < a.born <= end:
                lines[a.line] += a.block_bytes
        return lines


class _CudaSteps:
    """Steps on the GPU that is there. PyTorch's own peaks start over with each of them."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def end(self, model: Any, optimizers: Iterable[Any], gradient_bytes: int) -> StepMemory:
        peak = self._cuda.max_memory_allocated()
        held = {
            Category.PARAMETERS: _storage_bytes((*model.parameters(), *model.buffers())),
            Category.GRADIENTS: gradient_bytes,
            Category.OPTIMIZER_STATES: _storage_bytes(_states(optimizers)),
        }
        held[Category.ACTIVATIONS] = max(0, peak - sum(held.values()))
        reserved, allocated = self._cuda.max_memory_reserved(), self._cuda.memory_allocated()
        return StepMemory(peak, reserved, allocated, Ledger.of(held.items(), measured=True))

    def leaking_line(self) -> str:
        return ""  # counters do not know


def _states(optimizers: Iterable[Any]) -> Iterable[Any]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from state.values() if isinstance(state, Mapping) else ()


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes on the GPU, each storage once: tied weights and views share one."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if getattr(tensor, "is_cuda", False):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())

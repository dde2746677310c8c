"""Bytes and seconds of a CUDA device, real or virtual. It does not know what it measures.

On a real card seconds come from its own events; on a virtual one, where nothing runs, from the clock, which knows how long
the operators would have taken, and the host that launches them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from tonnage.errors import RequestError
from tonnage.fit.survey.virtual_clock import card_of, clocked
from tonnage.fit.virtual import on_virtual_gpu

_BUSY = 0.9  # share of the card's time for which the host was busy too, above which the host is what took the time
_BURST_S = 5e-3  # of launches in the card's queue, which holds about a thousand
_BURSTS = 3
_CYCLES_PER_S = 2e9  # of a card's clock, roughly


@dataclass
class Watch:
    """What happened while it was open, against what was allocated when it began."""

    before_bytes: int
    peak_bytes: int = 0  # highest point, beyond `before_bytes`
    kept_bytes: int = 0  # what is still there at the end


@dataclass(frozen=True)
class Duration:
    """Time of one call: on the card, and of the host that launches its kernels."""

    gpu_s: float
    host_s: float = 0.0


class Meter:
    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RequestError(
                f"fit measures GPU memory, and this model is on {device.type!r}.",
                hint='Move the model to "cuda", or plan on a GPU that you do not have: with tonnage.virtual_gpu("h200"): ...',
            )
        self.device = device
        self.virtual = on_virtual_gpu(device)

    @property
    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def capacity_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def free_bytes(self) -> int:
        """What PyTorch could hold in all: what it has reserved, and what the card has left."""
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        watch = Watch(self.allocated_bytes)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield watch
        watch.peak_bytes = torch.cuda.max_memory_allocated(self.device) - watch.before_bytes
        watch.kept_bytes = self.allocated_bytes - watch.before_bytes

    def new_peak(self) -> int:
        """The highest point since this was asked last, or since a watch began."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak_bytes

    def time(self, run: Callable[[], object], *, least_s: float = 0.1) -> Duration:
        """Time one call, over as many as `least_s` holds: a card under load is slower than one that woke up."""
        if self.virtual:
            return Duration(*clocked(run, card_of(self.device)))
        once = self._agreed(self._timed(run, 1))
        repeats = min(200, max(2, round(least_s / max(once.gpu_s, 1e-6))))
        self._timed(run, max(1, repeats // 2))
        found = self._agreed(self._timed(run, repeats))
        if found.host_s < _BUSY * found.gpu_s:
            return Duration(found.gpu_s, min(once.host_s, found.host_s))
        # The card waits for the host. In a step the host may be ahead of it, so the card's own time is wanted too.
        calls = max(1, int(_BURST_S / found.host_s))
        bursts = [self._timed(run, calls, behind_s=2 * calls * found.host_s) for _ in range(_BURSTS)]
        return self._agreed(Duration(min(burst.gpu_s for burst in bursts), found.host_s))

    def _timed(self, run: Callable[[], object], calls: int, *, behind_s: float = 0.0) -> Duration:
        """`behind_s`: the card begins so much later, and finds the calls in its queue."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if behind_s:
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(int(behind_s * _CYCLES_PER_S))
        start.record()
        began_s = perf_counter()
        for _ in range(calls):
            run()
        host_s = perf_counter() - began_s
        end.record()
        end.synchronize()
        return Duration(float(start.elapsed_time(end)) / 1e3 / calls, host_s / calls)

    def _agreed(self, found: Duration) -> Duration:
        """What counts where several measure together."""
        return found

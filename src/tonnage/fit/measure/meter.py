"""Bytes and seconds of a CUDA device, real or virtual. It does not know what it measures.

On a real card seconds come from its own events; on a virtual one, where nothing runs, from a roofline over the
operators that would have.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tonnage.errors import RequestError
from tonnage.fit.measure.roofline_clock import RooflineClock
from tonnage.fit.modules import eagerly
from tonnage.fit.virtual import on_virtual_gpu


@dataclass
class Watch:
    """What happened while it was open, against what was allocated when it began."""

    before_bytes: int
    peak_bytes: int = 0  # highest point, beyond `before_bytes`
    kept_bytes: int = 0  # what is still there at the end


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
    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

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

    def seconds(self, run: Callable[[], object], *, least_s: float = 0.25) -> float:
        """Of one call, over as many as a quarter of a second holds: a card under load is slower than one that woke up."""
        if self.virtual:
            # The clock looks at operators. Dynamo compiles nothing beside such a mode, and would never again.
            with eagerly(), RooflineClock(self.device) as clock:
                run()
            return clock.seconds
        once = self._timed(run, 1)
        repeats = min(200, max(2, round(least_s / max(once, 1e-6))))
        self._timed(run, max(1, repeats // 2))
        return self._timed(run, repeats)

    def _timed(self, run: Callable[[], object], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

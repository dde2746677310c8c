"""Continues a run after the request that the card cannot hold, so that the memory of the whole run is known.

The first request that fails is granted, and the card has no limit from then on, unless the script would catch the
error: then it gets the error as on a real card. Where the script would have died, its traceback is printed. Endless
training is stopped once its steps repeat, and any run after a while.
"""

import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from tonnage.allocator import Shortage
from tonnage.allocator.segments import UNLIMITED_BYTES
from tonnage.recording.records import MarkKind
from tonnage.script.catching import is_caught, stacks
from tonnage.script.running import RUNNER, is_ours

if TYPE_CHECKING:
    from tonnage.virtual.recorded import RecordedDevice

_ALIKE_STEPS = 3
_REPEATING_S = 20  # how long repeating steps may continue: what follows them (evaluation, saving) counts too
_PATIENCE_S = 300
_HERE = "tonnage: here it runs out of memory. It goes on without a limit, to see how much it needs in all."


class Stopped(BaseException):
    """Ends a script that continued long enough. Handlers for `Exception` do not catch it."""


class GoingOn:
    """Whether a run continues past its memory limit, since when, and how it ended."""

    def __init__(self, device: "RecordedDevice", error: type[BaseException]) -> None:
        self._device = device
        self._error = error
        self.since: int | None = None  # the last event before the granted request
        self.at_oom = 0  # number of failed requests up to it
        self.stopped_by = ""
        self._began = 0.0
        self._steps: list[tuple[int, int, int]] = []  # by step: blocks allocated, their bytes, bytes held at its end
        self._seen = 0

    def grants(self, shortage: Shortage) -> bool:
        """Whether to grant this failed request and lift the limit; if so, print the script's traceback."""
        device = self._device
        if self.since is not None or shortage.reserved_bytes + shortage.requested_bytes > UNLIMITED_BYTES:
            return False
        frames = []
        for frame in stacks(sys._getframe(1), device.attribution.main_thread):
            if frame.f_code.co_filename == RUNNER:
                break
            frames.append(frame)
        if is_caught(self._error, frames):
            return False
        self.since, self.at_oom, self._began = device.sequence, len(device.ooms), time.monotonic()
        self._seen = len(device.allocations)
        own = [(frame, frame.f_lineno) for frame in reversed(frames) if not is_ours(frame.f_code.co_filename)]
        lines = ["Traceback (most recent call last):\n", *traceback.StackSummary.extract(iter(own)).format()]
        print(f"{''.join(lines)}torch.{self._error.__name__}: {shortage.message}\n{_HERE}", file=sys.stderr)
        device.lift_limit()
        return True

    def check(self, kind: MarkKind) -> None:
        """At the start of a phase or step, stop the script if it has continued long enough."""
        if self.since is None:
            return
        gone_on_s = time.monotonic() - self._began
        if kind == "step":
            made = self._device.allocations[self._seen :]
            self._seen = len(self._device.allocations)
            held = self._device.memory_stats()["allocated_bytes.all.current"]
            self._steps.append((len(made), sum(a.block_bytes for a in made), held))
            last = self._steps[-_ALIKE_STEPS:]
            if gone_on_s > _REPEATING_S and len(last) == _ALIKE_STEPS and len(set(last)) == 1:
                self.stopped_by = "repeats"
        if gone_on_s > _PATIENCE_S:
            self.stopped_by = self.stopped_by or "patience"
        if self.stopped_by and threading.get_ident() == self._device.attribution.main_thread:
            raise Stopped

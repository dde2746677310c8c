"""Work and futures that are done: nothing runs on a virtual GPU, so only messages between hosts can still be waited for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tonnage.script import profiler
from tonnage.virtual.cluster.calls import Group


class Notes:
    """Tells whoever captures a step of the collectives of one rank on the card: what was called, and who waits for it.

    A group's collectives run on a stream of its own, and its messages with each peer on another, as NCCL has it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lanes: dict[tuple[Group, tuple[int, ...]], int] = {}

    def called(
        self, group: Group, operation: str, card_bytes: int, among: tuple[int, ...] | None = None
    ) -> "Noted | None":
        """A collective with so many bytes in all, among these ranks of the group or all of them; None of host tensors."""
        if not card_bytes:
            return None
        ranks = among or group.ranks
        apart = -(-(ranks[-1] - ranks[0]) // (len(ranks) - 1)) if len(ranks) > 1 else 1
        self._count += 1
        lane = self._lanes.setdefault((group, among or ()), len(self._lanes) + 1)
        profiler.note("collective", operation, self._count, card_bytes, len(ranks), apart, lane)
        return Noted(self._count)


class Noted:
    """One collective that was noted."""

    def __init__(self, number: int) -> None:
        self.waited: Callable[[], None] = lambda: profiler.note("stream", "wait_collective", number)
        self.promised: Callable[[], None] = lambda: profiler.note("stream", "future_collective", number)


class DoneWork(dist.Work):
    """A collective's handle. `kept` are the tensors that the real one holds until somebody waits for it.

    The first wait calls `finish`, which takes what other ranks gave, and then `waited`.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        kept: Any = None,
        finish: Callable[[], None] | None = None,
        waited: Callable[[], None] | None = None,
        noted: Noted | None = None,
    ) -> None:
        super().__init__()
        self._noted = noted
        self._outputs = list(outputs)
        self._kept = kept
        self._to_do = [call for call in (finish, waited) if call is not None]

    def wait(self, timeout: Any = None) -> bool:
        """Done; what it held is let go."""
        if self._noted:
            self._noted.waited()
        return self._finish()

    def _finish(self) -> bool:
        calls, self._to_do = self._to_do, []
        for call in calls:
            call()
        self._kept = None
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future that is complete. Who asks for it, as DDP's reducer, waits when its backward pass is over."""
        if self._noted:
            self._noted.promised()
        self._finish()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        self._finish()
        return self._outputs

    def is_completed(self) -> bool:
        """Yes, once the peers' values are here: no time passes between two questions."""
        return self._finish()

    def is_success(self) -> bool:
        """Nothing fails silently here."""
        return True

    def exception(self) -> None:
        """Nor does it keep an error."""

    def synchronize(self) -> None:
        """The same as waiting."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Only receives from anybody have one; they are done when they return."""
        return -1

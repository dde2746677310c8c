"""Work handles and futures that are complete, because nothing runs on a virtual GPU; only host messages are waited for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tonnage.script import profiler
from tonnage.virtual.cluster.calls import ProcessGroup


class CollectiveNotes:
    """Notes a rank's collectives on the card for step capture: what was called, and when it is waited for.

    As in NCCL, a group's collectives run on one stream, and its messages with each peer on another.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lanes: dict[tuple[ProcessGroup, tuple[int, ...]], int] = {}

    def called(
        self, group: ProcessGroup, operation: str, card_bytes: int, among: tuple[int, ...] | None = None
    ) -> "Noted | None":
        """Note a collective of `card_bytes` among these ranks (default: the whole group); return None for host tensors."""
        if not card_bytes:
            return None
        ranks = among or group.ranks
        apart = -(-(ranks[-1] - ranks[0]) // (len(ranks) - 1)) if len(ranks) > 1 else 1
        self._count += 1
        lane = self._lanes.setdefault((group, among or ()), len(self._lanes) + 1)
        profiler.note("collective", operation, self._count, card_bytes, len(ranks), apart, lane)
        return Noted(self._count)


class Noted:
    """A noted collective."""

    def __init__(self, number: int) -> None:
        self.waited: Callable[[], None] = lambda: profiler.note("stream", "wait_collective", number)
        self.promised: Callable[[], None] = lambda: profiler.note("stream", "future_collective", number)


class DoneWork(dist.Work):
    """The handle of a collective. `kept` holds the tensors that the real handle would keep until it is waited for.

    The first wait calls `finish`, which receives what other ranks contributed, and then `waited`.
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
        """Finish the collective and release the tensors it held."""
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
        """Return a completed future. Callers such as DDP's reducer wait for it when the backward pass is over."""
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
        """Finish and return True: no time passes between two calls."""
        return self._finish()

    def is_success(self) -> bool:
        """Return True: errors are raised instead."""
        return True

    def exception(self) -> None:
        """Return None: errors are raised instead."""

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Return -1: `recv_anysource` is not supported."""
        return -1

"""What keeps ranks of one mind: small values agreed on, and a failure of one told to all.

Values go over a gloo group of our own, on the host: nothing waits for a GPU. A failure goes through the store that the
process group was made with, to a thread on every rank, which acknowledges it: so it arrives although the main thread
waits in a collective for the rank that failed. That wait ends when the failed process closes its connections; where it
does not (NCCL, a process that lingers), the thread aborts the groups, and in the end the process.

It does not know what ranks do together.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tonnage.errors import TonnageError
from tonnage.fit.virtual import on_virtual_gpu

Value = TypeVar("Value")

_POLL_S = 0.2
_HEARD_WITHIN_S = 5.0  # the rank that failed goes on to raise then, whoever has not heard
_SHARED_WITHIN_S = 1.0  # a failure that all share reaches all by itself
_ABORT_AFTER_S = 5.0  # of waiting for a rank that failed: the groups are given up
_END_AFTER_S = 5.0  # and then: nothing wakes the main thread, the process ends and says why
_ALONE = -1  # the phase of an error between phases
_TOLD = "told_to_ranks"  # a mark on an error, so that it is told once, in the innermost phase
_BACKENDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket timeout")


class RankFailed(TonnageError):
    """Another rank raised, and the job is over; the sentence holds its error."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(f"Rank {rank} raised {error}", hint=f"Look at the log of rank {rank}.")
        self.rank = rank


class Agreement:
    """Agreement of all ranks of a mesh. Every rank makes it at the same time and calls the same methods in the same order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.members: list[int] = mesh.mesh.flatten().tolist()
        self.rank = dist.get_rank()
        self.size = len(self.members)
        self._group: Any = dist.new_group(self.members, backend="gloo", use_local_synchronization=True)
        key = self.share(os.urandom(8).hex())
        # On a virtual cluster some ranks stand for all, and it tells failures itself.
        virtual = on_virtual_gpu(torch.device(mesh.device_type))
        self._news = None if virtual else _News(mesh, self.members, self.rank, key)

    @property
    def first(self) -> bool:
        return self.rank == self.members[0]

    def share(self, value: Value) -> Value:
        """Return the first rank's value."""
        box = [value]
        dist.broadcast_object_list(box, src=self.members[0], group=self._group)
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def largest(self, *values: float) -> list[float]:
        """Each of them as it is on the rank where it is largest."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=how, group=self._group)
        return [float(number) for number in numbers]

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks, on the device where it is. What is given stays as it is."""
        total = value.detach().clone()
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dimension))
        return total

    def copy_from_first(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Let every rank hold the first one's values, one tensor at a time, whatever device they are on."""
        for tensor in tensors:
            moved = tensor.detach().to(device)
            for dimension in range(self.mesh.ndim):
                group = self.mesh.get_group(dimension)
                dist.broadcast(moved, src=dist.get_global_rank(group, 0), group=group)
            if moved.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(moved)

    @contextmanager
    def together(self, *, settled: bool = False) -> Iterator[None]:
        """What raises inside on one rank is told to all; one without an error of its own raises `RankFailed`.

        `settled`: nobody leaves before all are through, so that nobody goes on where another has failed.
        """
        with self._news.phase(settled=settled) if self._news else nullcontext():
            yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around what each rank does for itself between phases: others, who may wait for it in the next, are told."""
        try:
            yield
        except Exception as error:
            if self._news:
                self._news.tell_alone(error)
            raise

    def shared(self, error: BaseException) -> bool:
        """Whether what was raised inside `together` last was raised on every rank."""
        return self._news is None or self._news.shared(error)

    def meet(self) -> bool:
        """Whether all ranks come here within a few seconds."""
        return self._news is None or self._news.meet()

    def close(self) -> None:
        if self._news:
            self._news.close()


@dataclass(frozen=True)
class _Failure:
    """A failure of one rank in one phase. Ranks go through the same phases in the same order."""

    rank: int
    phase: int
    words: str

    @property
    def error(self) -> RankFailed:
        return RankFailed(self.rank, self.words)


class _News:
    """Failures of other ranks, as a thread of this one hears them."""

    def __init__(self, mesh: DeviceMesh, members: Sequence[int], rank: int, key: str) -> None:
        self.members, self.rank, self.mesh = members, rank, mesh
        store = dist.distributed_c10d._get_default_store()
        # The main thread and the other one each have a connection: a wait on one holds it.
        self._out, self._in = (dist.PrefixStore(f"tonnage/{key}", store.clone()) for _ in range(2))
        self._heard: list[_Failure] = []
        self._own: set[int] = set()  # phases in which this rank failed itself
        self._phases = self._depth = self._meetings = 0
        self._alert_until_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="tonnage-ranks", daemon=True)
        self._thread.start()
        # Inside a call of the store while the interpreter ends, the thread would take the whole process down.
        atexit.register(self.close)

    @contextmanager
    def phase(self, *, settled: bool) -> Iterator[None]:
        self._check()
        self._phases, self._depth = self._phases + 1, self._depth + 1
        phase = self._phases
        try:
            yield
            if settled:  # wait for the others; raise where one of them failed
                self._out.add(f"through/{phase}", 1)
                while self._out.add(f"through/{phase}", 0) < len(self.members):
                    self._check()
                    time.sleep(_POLL_S / 4)
        except BaseException as error:
            self._explain(error, phase)
            raise
        finally:
            self._depth -= 1

    def tell_alone(self, error: BaseException) -> None:
        """What was raised outside of any phase is nobody else's."""
        self._explain(error, _ALONE)

    def meet(self) -> bool:
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        try:
            self._out.add(key, 1)
            return self._within_time(lambda: self._out.add(key, 0) >= len(self.members))
        except RuntimeError:
            return False  # the store is gone with the rank that kept it

    def _check(self) -> None:
        fatal = self._fatal()
        if fatal is not None:
            raise fatal.error

    def _fatal(self) -> _Failure | None:
        """A failure that this rank did not share."""
        return next((failure for failure in self._heard if failure.phase not in self._own), None)

    def _explain(self, error: BaseException, phase: int) -> None:
        """Tell the others; an error that only says that a peer is gone is replaced by that peer's own."""
        if isinstance(error, RankFailed) or _TOLD in error.__dict__:
            return
        if _from_a_backend(error) and self._within_time(lambda: self._fatal() is not None):
            fatal = self._fatal()
            assert fatal is not None
            raise fatal.error from error
        self._own.add(phase)
        error.__dict__[_TOLD] = True  # held here, it would hold its frames, and those all memory of the step
        self._alert_until_s = time.monotonic() + 2 * _HEARD_WITHIN_S  # others may tell the same, and wait to be heard
        words = f"{type(error).__name__}: {error.words if isinstance(error, TonnageError) else error}"
        try:
            number = self._out.add("failures", 1)
            self._out.set(f"failure/{number}", json.dumps([self.rank, phase, words]))
            self._within_time(lambda: self._out.add(f"heard/{number}", 0) >= len(self.members))
        except RuntimeError:
            return  # the store is gone with the rank that kept it

    def shared(self, error: BaseException) -> bool:
        """Whether the failure that was told last is every rank's."""
        assert _TOLD in error.__dict__

        def all_failed() -> bool:
            phases = [failure.phase for failure in self._heard if failure.phase in self._own]
            return phases.count(max(self._own)) == len(self.members) - 1

        return self._within_time(all_failed)

    def _within_time(self, ready: Callable[[], bool]) -> bool:
        until = time.monotonic() + _HEARD_WITHIN_S
        while not ready():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S / 4)
        return True

    def _listen(self) -> None:
        heard = 0
        try:
            while not self._closed.wait(_POLL_S):
                if not self._depth and time.monotonic() > self._alert_until_s:
                    continue  # nobody waits; and at the end of a job the store may go before this thread does
                for number in range(heard + 1, self._in.add("failures", 0) + 1):
                    failure = _Failure(*json.loads(self._in.get(f"failure/{number}")))
                    if failure.rank != self.rank:
                        self._heard.append(failure)
                    self._in.add(f"heard/{number}", 1)
                    heard = number
                if self._fatal() is not None and self._outlasts(_SHARED_WITHIN_S):
                    self._end()
        except RuntimeError:
            return  # the store is gone: whoever kept it has ended

    def _end(self) -> None:
        """The main thread comes out by itself where connections break; else groups are aborted, or all of it ends."""
        if self._outlasts(_ABORT_AFTER_S):
            for dimension in range(self.mesh.ndim):
                self.mesh.get_group(dimension).abort()
        fatal = self._fatal()
        if self._outlasts(_END_AFTER_S) and fatal is not None:
            print(fatal.error.words, file=sys.stderr, flush=True)
            os._exit(fatal.error.exit_code)

    def _outlasts(self, seconds: float) -> bool:
        """Whether the main thread stays so long inside what it does with the others, without an error of its own."""
        until = time.monotonic() + seconds
        while self._depth and self._fatal() is not None and time.monotonic() < until:
            if self._closed.wait(_POLL_S):
                return False
        return self._depth > 0 and self._fatal() is not None

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(_HEARD_WITHIN_S)


def _from_a_backend(error: BaseException) -> bool:
    """Whether it says no more than that a collective could not be finished."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in words for word in _BACKENDS)
    )

"""Coordinate ranks: agree on small values, and report a failure of one rank to all.

Values use a separate gloo group on the host, so nothing waits for a GPU. A failure goes through the process group's
store to a thread on every rank, which acknowledges it: so it arrives even while the main thread waits in a
collective for the failed rank. That wait ends when the failed process closes its connections; if it does not (NCCL,
a process that lingers), the thread aborts the groups, and finally the process. It does not know what the ranks do
together.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tonnage.errors import TonnageError
from tonnage.fit.virtual import on_virtual_gpu

Value = TypeVar("Value")

_POLL_S = 0.2
_HEARD_WITHIN_S = 5.0  # afterwards the failed rank raises, even if not all have acknowledged
_SHARED_WITHIN_S = 1.0  # a failure on all ranks needs no report
_ABORT_AFTER_S = 5.0  # of waiting for a failed rank: abort the groups
_END_AFTER_S = 5.0  # after that, if the main thread still hangs: end the process with the reason
_ALONE = -1  # the phase of an error between phases
_TOLD = "told_to_ranks"  # attribute of an error, so that it is reported once, in the innermost phase
_BACKENDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket timeout")


class RankFailed(TonnageError):
    """Another rank raised, and the job is over; the message holds its error."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(f"Rank {rank} raised {error}", hint=f"Look at the log of rank {rank}.")
        self.rank = rank


class Agreement:
    """Coordinates all ranks of a mesh. Every rank creates it and calls the same methods in the same order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.members: list[int] = mesh.mesh.flatten().tolist()
        self.rank = dist.get_rank()
        self.size = len(self.members)
        self._group: Any = dist.new_group(self.members, backend="gloo", use_local_synchronization=True)
        key = self.share(os.urandom(8).hex())
        self._heard: list[tuple[int, int, str]] = []  # failures of others: rank, phase (the same on all ranks), error
        self._own: set[int] = set()  # phases in which this rank itself failed
        self._phases = self._depth = self._meetings = 0
        self._alert_until_s = 0.0
        # On a virtual cluster some ranks stand for all, and the cluster reports failures itself.
        self._reports = not on_virtual_gpu(torch.device(mesh.device_type))
        if not self._reports:
            return
        store = dist.distributed_c10d._get_default_store()
        # Both threads need their own connection: a wait blocks it.
        self._out, self._in = (dist.PrefixStore(f"tonnage/{key}", store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="tonnage-ranks", daemon=True)
        self._thread.start()
        # If the interpreter exited during a store call, the thread would crash the process.
        atexit.register(self.close)

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
        """Return the maximum of each value over all ranks."""
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return [float(number) for number in numbers]

    def smallest(self, *values: float) -> list[float]:
        return [-value for value in self.largest(*(-value for value in values))]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks on the tensor's device; the input is unchanged."""
        total = value.detach().clone()
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dimension))
        return total

    def copy_from_first(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Copy the first rank's values to every rank, one tensor at a time, on any device."""
        for tensor in tensors:
            moved = tensor.detach().to(device)
            for dimension in range(self.mesh.ndim):
                group = self.mesh.get_group(dimension)
                dist.broadcast(moved, src=dist.get_global_rank(group, 0), group=group)
            if moved.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(moved)

    @contextmanager
    def together(self, *, settled: bool = False) -> Iterator[None]:
        """Report an error inside to all ranks; a rank without an error of its own raises `RankFailed`.

        With `settled`, no rank leaves before all are through, so that none continues after another failed.
        """
        if not self._reports:
            yield
            return
        self._check()
        self._phases, self._depth = self._phases + 1, self._depth + 1
        phase = self._phases
        try:
            yield
            if settled:  # wait for the others; raise if one of them failed
                self._out.add(f"through/{phase}", 1)
                while self._out.add(f"through/{phase}", 0) < self.size:
                    self._check()
                    time.sleep(_POLL_S / 4)
        except BaseException as error:
            self._explain(error, phase)
            raise
        finally:
            self._depth -= 1

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors of what each rank does alone between phases, since others may wait for it in the next."""
        try:
            yield
        except Exception as error:
            if self._reports:
                self._explain(error, _ALONE)
            raise

    def shared(self, error: BaseException) -> bool:
        """Return whether the last error inside `together` was raised on every rank."""
        if not self._reports:
            return True
        assert _TOLD in error.__dict__
        return self._within_time(lambda: [phase for _, phase, _ in self._heard].count(max(self._own)) == self.size - 1)

    def meet(self) -> bool:
        """Return whether all ranks arrive here within a few seconds."""
        if not self._reports:
            return True
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        try:
            self._out.add(key, 1)
            return self._within_time(lambda: self._out.add(key, 0) >= self.size)
        except RuntimeError:
            return False  # the store's rank is gone

    def close(self) -> None:
        if self._reports:
            atexit.unregister(self.close)
            self._closed.set()
            self._thread.join(_HEARD_WITHIN_S)

    # Failures of other ranks ------------------------------------------------------------------------------------------

    def _check(self, cause: BaseException | None = None) -> None:
        if fatal := self._fatal():
            raise fatal from cause

    def _fatal(self) -> RankFailed | None:
        """Return a failure that this rank did not share."""
        return next((RankFailed(rank, words) for rank, phase, words in self._heard if phase not in self._own), None)

    def _explain(self, error: BaseException, phase: int) -> None:
        """Report the error to the others; if it only says that a peer is gone, raise the peer's error instead."""
        if isinstance(error, RankFailed) or _TOLD in error.__dict__:
            return
        only_says_so = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _BACKENDS)
        )
        if only_says_so and not isinstance(error, torch.OutOfMemoryError):
            self._within_time(lambda: self._fatal() is not None)
            self._check(error)
        self._own.add(phase)
        error.__dict__[_TOLD] = True  # keeping the error itself would keep its frames, and with them the step's memory
        # Others may report the same and wait for acknowledgement.
        self._alert_until_s = time.monotonic() + 2 * _HEARD_WITHIN_S
        words = f"{type(error).__name__}: {error.words if isinstance(error, TonnageError) else error}"
        try:
            number = self._out.add("failures", 1)
            self._out.set(f"failure/{number}", json.dumps([self.rank, phase, words]))
            self._within_time(lambda: self._out.add(f"heard/{number}", 0) >= self.size)
        except RuntimeError:
            return  # the store's rank is gone

    def _within_time(self, ready: Callable[[], bool]) -> bool:
        until = time.monotonic() + _HEARD_WITHIN_S
        while not (arrived := ready()) and time.monotonic() <= until:
            time.sleep(_POLL_S / 4)
        return arrived

    def _listen(self) -> None:
        heard = 0
        try:
            while not self._closed.wait(_POLL_S):
                if not self._depth and time.monotonic() > self._alert_until_s:
                    continue  # no rank waits; and at the end of a job the store may close before this thread
                for number in range(heard + 1, self._in.add("failures", 0) + 1):
                    rank, phase, words = json.loads(self._in.get(f"failure/{number}"))
                    if rank != self.rank:
                        self._heard.append((rank, phase, words))
                    self._in.add(f"heard/{number}", 1)
                    heard = number
                if self._fatal() is None or not self._outlasts(_SHARED_WITHIN_S):
                    continue
                # The main thread may leave by itself; else abort the groups, and finally end the process.
                if self._outlasts(_ABORT_AFTER_S):
                    for dimension in range(self.mesh.ndim):
                        self.mesh.get_group(dimension).abort()
                fatal = self._fatal()
                if self._outlasts(_END_AFTER_S) and fatal is not None:
                    print(fatal.words, file=sys.stderr, flush=True)
                    os._exit(fatal.exit_code)
        except RuntimeError:
            return  # the store is gone: its rank has ended

    def _outlasts(self, seconds: float) -> bool:
        """Return whether the main thread stays inside a phase for this long without an error of its own."""
        until = time.monotonic() + seconds
        while self._depth and self._fatal() is not None and time.monotonic() < until:
            if self._closed.wait(_POLL_S):
                return False
        return self._depth > 0 and self._fatal() is not None

"""The waiting queue: its order, and which requests are refused.

    RequestError       the request was wrong
    ├── QueueFull      too many are waiting; `retry_after_s` says when to retry
    └── NeverFits      too long for the context or for the whole cache

The order: preempted sequences, oldest first; then one per tenant in turn, first come first served within a tenant.
Further samples of a prompt wait until the first of them has computed it. Adding, taking and removing take constant
time however many wait. This module does not know what a sequence needs to run.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from tonnage.errors import RequestError
from tonnage.serve.scheduler.sequence import Sequence

RANK = attrgetter("rank")
SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


class QueueFull(RequestError):
    """Too many requests are waiting."""

    def __init__(self, problem: str, *, retry_after_s: float) -> None:
        super().__init__(problem, hint=f"Ask again in {retry_after_s:.0f} s.")
        self.retry_after_s = retry_after_s


class NeverFits(RequestError):
    """The request is too long for the context, or for the whole cache."""


class FinishRate:
    """The rate at which sequences finished lately, for estimating how fast a full queue drains."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=64)

    def note(self, now_s: float) -> None:
        """Record that a sequence has finished."""
        self._times_s.append(now_s)

    def retry_after_s(self, waiting: int) -> float:
        """Return the time in which half of the queue is served; the minimum if the clock gives no estimate."""
        passed_s = self._times_s[-1] - self._times_s[0] if self._times_s else 0.0
        if not passed_s > 0:
            return SHORTEST_RETRY_S
        estimate_s = passed_s / (len(self._times_s) - 1) * waiting / 2
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, estimate_s))


class Queue:
    """The waiting sequences."""

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []
        self._lines: OrderedDict[str, OrderedDict[Sequence, None]] = OrderedDict()  # by tenant; no line is empty
        self._aside: dict[Sequence, list[Sequence]] = {}  # by parent
        self.fresh = 0  # those that have never run

    def __len__(self) -> int:
        return self.fresh + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, *self._lines.values(), *self._aside.values())

    def __contains__(self, sequence: Sequence) -> bool:
        if sequence.rank >= 0:
            return self._preempted_index(sequence) is not None
        return sequence in self._lines.get(sequence.salt, ()) or sequence in self._siblings(sequence)

    def add(self, sequence: Sequence, *, aside: bool = False) -> None:
        """Append to its tenant's line, or set aside until its parent calls."""
        if aside:
            assert sequence.parent is not None
            self._aside.setdefault(sequence.parent, []).append(sequence)
        else:
            self._line(sequence)[sequence] = None
        self.fresh += 1

    def call(self, parent: Sequence) -> None:
        """Move sequences set aside for this parent to the front of their tenant's line."""
        for sequence in reversed(self._aside.pop(parent, [])):
            line = self._line(sequence)
            line[sequence] = None
            line.move_to_end(sequence, last=False)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all that have not run yet."""
        insort(self._preempted, sequence, key=RANK)

    def first(self) -> Sequence | None:
        """Return the next sequence, or None."""
        if self._preempted:
            return self._preempted[0]
        return next(iter(next(iter(self._lines.values())))) if self._lines else None

    def pop(self) -> None:
        """Remove the first sequence, which is admitted; the next turn is another tenant's."""
        sequence = self.first()
        assert sequence is not None
        self.remove(sequence)
        if sequence.rank < 0 and sequence.salt in self._lines:
            self._lines.move_to_end(sequence.salt)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        if sequence.rank >= 0:
            index = self._preempted_index(sequence)
            assert index is not None
            del self._preempted[index]
            return
        self.fresh -= 1
        line = self._lines.get(sequence.salt)
        if line is None or sequence not in line:
            self._siblings(sequence).remove(sequence)
            return
        del line[sequence]
        if not line:
            del self._lines[sequence.salt]

    def _line(self, sequence: Sequence) -> OrderedDict[Sequence, None]:
        return self._lines.setdefault(sequence.salt, OrderedDict())

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        return self._aside.get(sequence.parent, []) if sequence.parent is not None else []

    def _preempted_index(self, sequence: Sequence) -> int | None:
        index = bisect_left(self._preempted, sequence.rank, key=RANK)
        found = index < len(self._preempted) and self._preempted[index] is sequence
        return index if found else None

"""When each launch begins and ends: the host launches one after another, and each stream runs its own in order.

Kernel times come from `kernels`, host times from `host`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# From a launch until an idle GPU begins, and between two kernels of one stream, on an H200.
LAUNCH_LATENCY_S = 5e-6
KERNEL_GAP_S = 1.2e-6
# Launches that a stream can queue; the host waits when it is full.
QUEUE_LENGTH = 1024


# Pseudo-streams if the host itself waits: for an event, or for everything launched so far.
HOST, EVERYTHING = -1, -2


@dataclass(frozen=True, slots=True)
class Task:
    """What the host does next: some work of its own, then a launch, if any, or a wait for the GPU.

    The `kernels` of one operator run in sequence and share its `seconds`; the last `launching_s` of `host_s` pass
    between the first and last launch. The stream continues when all events that it `awaits` have happened; the event
    that it `records` happens when its earlier work is done. An event recorded later in the step than it is awaited is
    the previous step's. With `synchronizes`, the host waits for the stream.
    """

    name: str
    kind: str
    seconds: float = 0.0
    host_s: float = 0.0
    kernels: int = 1
    launching_s: float = 0.0
    stream: int = 0
    awaits: tuple[str, ...] = ()
    records: str = ""
    synchronizes: bool = False
    share: float = 0.0  # of the tensor cores' peak rate, while it runs


@dataclass(frozen=True, slots=True)
class Span:
    """A launch on its stream, in seconds since the step began."""

    name: str
    kind: str
    stream: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step in the steady state."""

    step_s: float
    host_s: float  # the host's own work in it
    spans: tuple[Span, ...]
    by_kind: dict[str, float] = field(default_factory=dict)  # GPU seconds
    idle_s: float = 0.0  # while all streams are idle


def timeline(tasks: Sequence[Task], *, warm_steps: int = 2) -> StepTimeline:
    """Run a step's tasks repeatedly and return the last step, which is in the steady state."""
    lanes = _Lanes()
    for task in (*tasks,) * warm_steps:
        lanes.run(task)
    began_s = lanes.end_s
    spans = [Span(task.name, task.kind, task.stream, *when) for task in tasks if (when := lanes.run(task))]
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_stream: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        by_kind[span.kind] += span.end_s - span.start_s
        by_stream[span.stream] += span.end_s - span.start_s
    # Streams may still catch up; in the long run no step is shorter than the busiest lane.
    host_s = sum(task.host_s for task in tasks)
    step_s = max(lanes.end_s - began_s, host_s, *by_stream.values())
    # Relative to the step. A stream that is ahead of the others began in the previous step, and will again.
    placed = []
    for span in spans:
        start_s, length_s = span.start_s - began_s, span.end_s - span.start_s
        if start_s < 0:
            start_s = max(0.0, min(start_s % step_s, step_s - length_s))
        placed.append(replace(span, start_s=start_s, end_s=start_s + length_s))
    shown = tuple(sorted(placed, key=lambda span: span.start_s))
    covered_s = until_s = 0.0
    for span in shown:
        covered_s += max(0.0, span.end_s - max(until_s, span.start_s))
        until_s = max(until_s, span.end_s)
    kinds, idle_s = sorted(by_kind.items(), key=lambda kind: -kind[1]), max(0.0, step_s - covered_s)
    return StepTimeline(step_s=step_s, host_s=host_s, spans=shown, by_kind=dict(kinds), idle_s=idle_s)


def steady_s(tasks: Sequence[Task], card: float, host: float) -> float:
    """Return the length of a step if GPU and host are slower by these factors."""
    lanes, began_s = _Lanes(card, host), 0.0
    for _ in range(2):
        began_s = lanes.end_s
        for task in tasks:
            lanes.run(task)
    return lanes.end_s - began_s


class _Lanes:
    """The positions of the host and every stream, with slowdown factors for GPU and host."""

    def __init__(self, card: float = 1.0, host: float = 1.0) -> None:
        self._card, self._host = card, host
        self.host_s = 0.0
        self.free_s: dict[int, float] = {}  # when each stream is done
        self._queued: dict[int, list[float]] = {}  # when each of a stream's last launches begins
        self._events: dict[str, float] = {}  # when each happened last

    @property
    def end_s(self) -> float:
        """When everything launched so far is done, or the host, if that is later."""
        return max(self.host_s, *self.free_s.values()) if self.free_s else self.host_s

    def run(self, task: Task) -> tuple[float, float] | None:
        """Return when a task's launch begins and ends; None without a launch."""
        self.host_s += task.host_s * self._host
        stream = task.stream
        if task.awaits:
            self.free_s[stream] = max(self.free_s.get(stream, 0.0), *(self._events.get(e, 0.0) for e in task.awaits))
        when = None
        if task.seconds:
            # A full queue holds the host up; an idle GPU begins some time after the launch, and goes on kernel by kernel.
            queued = self._queued.setdefault(stream, [])
            if len(queued) >= QUEUE_LENGTH and queued[-QUEUE_LENGTH] > self.host_s:
                self.host_s = queued[-QUEUE_LENGTH]
            launched_s = self.host_s + LAUNCH_LATENCY_S
            start_s = max(self.free_s.get(stream, 0.0) + KERNEL_GAP_S, launched_s - task.launching_s * self._host)
            seconds = task.seconds * self._card
            end_s = start_s + seconds + (task.kernels - 1) * KERNEL_GAP_S
            if task.launching_s:
                end_s = max(end_s, launched_s + seconds / task.kernels)
            self.free_s[stream] = end_s
            queued.append(start_s)
            when = start_s, end_s
        if task.records:
            self._events[task.records] = self.free_s.get(stream, 0.0)
        if task.synchronizes:
            done_s = self.end_s if stream == EVERYTHING else self.free_s.get(stream, 0.0)
            self.host_s = max(self.host_s, done_s)
        return when

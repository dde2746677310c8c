"""A source of items, and how busy the GPU was while it was profiled.

A gap between kernels ends with a kernel. The part of it before the host launched that kernel is the host's; the rest is
launch latency, or a wait for another stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.roofline.items import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """The time of one GPU from its first kernel to the end of its last, over all streams.

    `host_s` is idle time before the next kernel was launched: the host was late. `queue_s` is idle time after that:
    launch latency, or a wait for another stream.
    """

    span_s: float
    busy_s: float
    host_s: float
    queue_s: float
    launches: int


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or copy on the GPU, in seconds; `launched_s` is when the host's call returned, None if not recorded."""

    start_s: float
    end_s: float
    launched_s: float | None = None


def timeline_of(activities: Iterable[Activity]) -> GpuTime | None:
    """Return the busy and idle time of one GPU; None if nothing ran."""
    ordered = sorted(activities, key=lambda activity: activity.start_s)
    if not ordered:
        return None
    busy_until = first_s = ordered[0].start_s
    busy_s = host_s = queue_s = 0.0
    for activity in ordered:
        gap_s = max(0.0, activity.start_s - busy_until)
        late_s = 0.0 if activity.launched_s is None else min(gap_s, max(0.0, activity.launched_s - busy_until))
        host_s, queue_s = host_s + late_s, queue_s + gap_s - late_s
        busy_s += max(0.0, activity.end_s - max(busy_until, activity.start_s))
        busy_until = max(busy_until, activity.end_s)
    return GpuTime(span_s=busy_until - first_s, busy_s=busy_s, host_s=host_s, queue_s=queue_s, launches=len(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineProfile:
    """Items of one kind of source: "torch-profiler", "nsight-compute" or "model"; `gpu` is the GPU's name if known."""

    kind: str
    source: str
    gpu: str = ""
    items: tuple[Item, ...]
    timeline: GpuTime | None = None
    notes: tuple[str, ...] = ()

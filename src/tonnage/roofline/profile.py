"""What a source of items says of itself, and how busy the card was while it was watched. It judges nothing."""

from dataclasses import dataclass

from tonnage.roofline.items import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The time of one card from its first kernel to the end of its last, all streams together.

    `host_s` is idle time before the next kernel was launched: the host was late. `queue_s` is idle time after that: launch
    latency, or a wait for another stream.
    """

    span_s: float
    busy_s: float
    host_s: float
    queue_s: float
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Items of one kind of source: "torch-profiler", "nsight-compute" or "model"; `gpu` is the card's name where it says."""

    kind: str
    source: str
    gpu: str = ""
    items: tuple[Item, ...]
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()

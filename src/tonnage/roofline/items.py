"""One row of a roofline: a kernel, an operator or a part of a model. What a source does not say stays None."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.clock.operators import OperatorCall, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Figures are sums over `calls`; shares are the profiler's own, weighted by time.

    `dram_share` is of the peak bandwidth, if bytes are not counted; `sm_share` is the utilization of the SMs' busiest
    pipe, `on_chip_share` that of the busiest part of the memory path, including caches and shared memory. `blocks` is
    of one launch of the longest kernel. `link` is the direction of a copy between host and GPU. `kind` is that of a
    part of a model: "product", "attention", "elementwise" or "optimizer". `unknown` says why the work is unknown.
    `made` has the calls themselves with their counts, if the source has them.
    """

    name: str
    detail: str = ""
    group: str = ""
    calls: int = 1
    launches: int = 1
    seconds: float | None = None  # None: not measured
    work: Work
    dram_share: float | None = None
    sm_share: float | None = None
    on_chip_share: float | None = None
    blocks: int | None = None
    link: str = ""
    kind: str = ""
    kernels: tuple[str, ...] = ()
    unknown: str = ""
    made: tuple[tuple[OperatorCall, int], ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, tuple[str, ...]]:
        """What two items of the same kind share."""
        return self.group, self.name, self.detail, self.link, self.kernels


def gathered(items: Iterable[Item]) -> tuple[Item, ...]:
    """Merge equal items, in the order of their first occurrence."""
    sums: dict[tuple[object, ...], Item] = {}
    for item in items:
        key = (item.key, item.blocks)
        sums[key] = _sum(sums[key], item) if key in sums else item
    return tuple(sums.values())


def _sum(one: Item, other: Item) -> Item:
    def plus(first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else first + second

    def mean(name: str) -> float | None:
        first, second = getattr(one, name), getattr(other, name)
        if first is None or second is None or not one.seconds or not other.seconds:
            return first  # type: ignore[no-any-return]
        return float((first * one.seconds + second * other.seconds) / (one.seconds + other.seconds))

    # The calls are known only if both items have them.
    calls = Counter(dict(one.made)) + Counter(dict(other.made))
    work = replace(
        one.work,
        operations=plus(one.work.operations, other.work.operations),
        moved_bytes=plus(one.work.moved_bytes, other.work.moved_bytes),
    )
    return replace(
        one,
        calls=one.calls + other.calls,
        launches=one.launches + other.launches,
        seconds=plus(one.seconds, other.seconds),
        work=work,
        made=tuple(calls.items()) if one.made and other.made else (),
        dram_share=mean("dram_share"),
        sm_share=mean("sm_share"),
        on_chip_share=mean("on_chip_share"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """One GPU's time over all streams. Idle: `host_s` before the next launch, `queue_s` after it."""

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


_RETURNS = re.compile(r"^(?:void|static|__global__)\s+")
_ANONYMOUS = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
_APPLIED = re.compile(r"(\w*?)_?(?:[Ff]unctor(?:OnSelf)?_?(\w*)|_kernel_cuda|(?:CUDA)?KernelImpl)\b")
# Wrappers that say nothing of what is applied.
_EMPTY = {"CUDA", "AUnary", "BUnary"}
_DECORATION = re.compile(r"^(?:vectorized|unrolled)_|_kernel(?=_|$)")
_UNNAMED = 40


def short_kernel_name(name: str) -> str:
    """Return the function's own name, and what it applies if its templates say so."""
    bare = _ANONYMOUS.sub("", _RETURNS.sub("", name.strip()))
    head, _, templates = bare.partition("<")
    own = head.partition("(")[0].split("::")[-1].strip() or bare[:_UNNAMED]
    own = _DECORATION.sub("", own) or own
    words = (word for match in _APPLIED.finditer(templates) for word in match.groups())
    applied = next((word.strip("_") for word in words if word and word not in _EMPTY), "")
    return f"{own} {applied}" if applied and applied not in own else own

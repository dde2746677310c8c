"""One row of a roofline: a kernel, an operator or a part of a model, with what is known of its work.

What a source does not say is None, and stays None.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.clock.operators import OperatorCall
from tonnage.clock.work import Work


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
    # The calls are known only if both items have them.
    calls = Counter(dict(one.made))
    for call, count in other.made:
        calls[call] += count
    return replace(
        one,
        calls=one.calls + other.calls,
        launches=one.launches + other.launches,
        seconds=_plus(one.seconds, other.seconds),
        work=replace(
            one.work,
            operations=_plus(one.work.operations, other.work.operations),
            moved_bytes=_plus(one.work.moved_bytes, other.work.moved_bytes),
        ),
        dram_share=_mean(one.dram_share, other.dram_share, one, other),
        sm_share=_mean(one.sm_share, other.sm_share, one, other),
        on_chip_share=_mean(one.on_chip_share, other.on_chip_share, one, other),
        made=tuple(calls.items()) if one.made and other.made else (),
    )


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _mean(one: float | None, other: float | None, first: Item, second: Item) -> float | None:
    if one is None or other is None or not first.seconds or not second.seconds:
        return one
    return (one * first.seconds + other * second.seconds) / (first.seconds + second.seconds)

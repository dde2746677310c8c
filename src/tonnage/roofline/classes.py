"""What bounds an item: the ceiling that it comes nearest to, or none.

| class         | means                                                                                      |
|---------------|--------------------------------------------------------------------------------------------|
| memory-bound  | moving its bytes at full memory bandwidth takes a third of its time or more, and more      |
|               | than its arithmetic would                                                                  |
| compute-bound | the same for its operations at the full rate of their precision; if a profile counts no    |
|               | operations, the busiest pipe of the SMs is used instead                                    |
| latency-bound | neither explains a third of its time: it waits for its launch, for a GPU that it does      |
|               | not fill, or for its own loads                                                             |
| link-bound    | a copy between host and GPU                                                                |
| unknown       | the source does not say enough to tell                                                     |

Memory means the GPU's DRAM, by bytes. The utilization of "the memory pipe" says little: it includes caches and shared memory, and
a large matrix product keeps those as busy as its tensor cores while DRAM idles. It is used only if neither DRAM nor the SMs are
near their ceilings, for kernels that live in the caches. An item that was not measured (a part of a model) is bound by whichever
takes longer; latency-bound if both take less than the shortest kernel.
"""

from dataclasses import dataclass
from enum import StrEnum

from tonnage.roofline.ceilings import Ceilings
from tonnage.roofline.items import Item

# Below this share of both ceilings, neither is the limit.
NEAR = 1 / 3
# Above this share a ceiling is the limit, even if others are unknown.
_SURE = 0.6
# A kernel shorter than this many times the shortest one is mostly launch and drain.
_FLOORS = 2.0


class Bound(StrEnum):
    """The stable class names."""

    MEMORY = "memory-bound"
    COMPUTE = "compute-bound"
    LATENCY = "latency-bound"
    LINK = "link-bound"
    UNKNOWN = "unknown"


MEANINGS = {
    Bound.MEMORY: "bytes to and from the card's memory are what it waits for",
    Bound.COMPUTE: "arithmetic (or the SMs' instructions) is what it waits for",
    Bound.LATENCY: "neither explains a third of it: it waits for launches or loads",
    Bound.LINK: "a copy between host and card",
    Bound.UNKNOWN: "the source does not say how many bytes or operations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A class, and how near its ceiling the item came. Shares are of one ceiling each; None if unknown.

    `because` is the reason within the class: "bytes", "caches", "operations", "pipes", "launch", "blocks", "stalls",
    "pageable", "pinned" or "unknown". `bound_s` is the least time of all calls by what is known, else 0.
    """

    bound: Bound
    because: str
    memory_share: float | None
    compute_share: float | None
    share: float | None
    bound_s: float


def judge(item: Item, ceilings: Ceilings) -> Verdict:
    """Determine the ceiling, and how near it is."""
    if item.link:
        least_s = (item.work.moved_bytes or 0.0) / ceilings.host_link_bytes_per_s
        share = _share(least_s, item.seconds or 0.0)
        because = "pageable" if "pageable" in item.link.lower() else "pinned"
        return Verdict(
            bound=Bound.LINK, because=because, memory_share=None, compute_share=None, share=share, bound_s=least_s
        )
    if item.seconds is not None:
        return _measured(item, ceilings, item.seconds)
    # Predicted.
    memory_s, compute_s = (seconds or 0.0 for seconds in least_seconds(item, ceilings))
    floor_s = item.launches * ceilings.kernel_floor_s
    least_s = max(memory_s, compute_s)
    seconds = max(least_s, floor_s) or 1.0
    bound, because = (Bound.MEMORY, "bytes") if memory_s >= compute_s else (Bound.COMPUTE, "operations")
    if least_s < floor_s:
        bound, because, least_s = Bound.LATENCY, "launch", floor_s
    memory, compute = memory_s / seconds, compute_s / seconds
    return Verdict(
        bound=bound, because=because, memory_share=memory, compute_share=compute, share=None, bound_s=least_s
    )


def least_seconds(item: Item, ceilings: Ceilings) -> tuple[float | None, float | None]:
    """Return the least seconds of its bytes and of its operations, each at the ceiling."""
    work = item.work
    memory_s = None if work.moved_bytes is None else work.moved_bytes / ceilings.memory_bytes_per_s
    compute_s = None if work.operations is None else work.operations / ceilings.rate(work.precision)
    return memory_s, compute_s


def _measured(item: Item, ceilings: Ceilings, seconds: float) -> Verdict:
    memory_s, compute_s = least_seconds(item, ceilings)
    memory = item.dram_share if memory_s is None else _share(memory_s, seconds)
    counted = _share(compute_s, seconds)
    compute = max((share for share in (counted, item.sm_share) if share is not None), default=None)
    known = memory is not None and compute is not None
    near = NEAR if known else _SURE
    share = max((share for share in (memory, compute) if share is not None), default=None)
    least_s = (share or 0.0) * seconds
    if memory is not None and memory >= max(near, compute or 0.0):
        bound, because, share = Bound.MEMORY, "bytes", memory
    elif compute is not None and compute >= near:
        bound, because, share = Bound.COMPUTE, "operations" if compute == counted else "pipes", compute
    elif item.on_chip_share is not None and item.on_chip_share >= _SURE:
        bound, because, share = Bound.MEMORY, "caches", item.on_chip_share
    elif seconds <= _FLOORS * ceilings.kernel_floor_s * item.launches:
        # Kernels this short are mostly launch, whatever their work is.
        bound, because = Bound.LATENCY, "launch"
    elif not known:
        bound, because = Bound.UNKNOWN, "unknown"
    else:
        few = item.blocks is not None and item.blocks < ceilings.sm_count
        bound, because = Bound.LATENCY, "blocks" if few else "stalls"
    return Verdict(
        bound=bound, because=because, memory_share=memory, compute_share=compute, share=share, bound_s=least_s
    )


def _share(least_s: float | None, seconds: float) -> float | None:
    return least_s / seconds if least_s is not None and seconds > 0 else None

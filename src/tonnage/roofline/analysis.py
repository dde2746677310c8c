"""A profile against ceilings: every item with the ceiling that it comes nearest to, advice, and sums.

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

from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import get_args

from tonnage.clock.launch import Settings
from tonnage.hardware import Gpu
from tonnage.roofline.ceilings import Ceilings
from tonnage.roofline.items import Item, RooflineProfile

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


@dataclass(frozen=True, slots=True)
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
        return Verdict(Bound.LINK, because, None, None, share, least_s)
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
    return Verdict(bound, because, memory, compute, None, least_s)


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
    return Verdict(bound, because, memory, compute, share, least_s)


def _share(least_s: float | None, seconds: float) -> float | None:
    return least_s / seconds if least_s is not None and seconds > 0 else None


# Above this share a better kernel gains little.
AT_THE_CEILING = 0.7


def advice_for(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    """Return the one thing to try first."""
    match verdict.bound, verdict.because:
        case Bound.MEMORY, _:
            return _memory(item, verdict, ceilings)
        case Bound.COMPUTE, _:
            if verdict.because == "pipes":
                return "the SMs' pipes are busy: fewer or cheaper instructions; `ncu --set full` says which"
            factor = ceilings.rate("tf32") / ceilings.rate("fp32")
            if verdict.because == "operations" and ceilings.has(item.work.precision) == "fp32" and factor > 1:
                return f"plain FP32: TF32 allows {factor:.0f} times the rate (set_float32_matmul_precision)"
            if item.seconds is None:
                return "the best case: only fewer operations or a faster precision help"
            if verdict.share is not None and verdict.share >= AT_THE_CEILING:
                return "at the ceiling: only fewer operations or a faster precision help"
            return "short of the ceiling: sizes in multiples of 128, larger tiles"
        case Bound.LATENCY, "launch":
            return "over before the card is full: fuse it, batch it, or use a CUDA graph"
        case Bound.LATENCY, "blocks":
            return f"{item.blocks} blocks for {ceilings.sm_count} SMs: split the work finer"
        case Bound.LATENCY, _:
            return "neither ceiling explains its time: `ncu --set full` says what it waits for"
        case Bound.LINK, because:
            moved, seconds = item.work.moved_bytes, item.seconds
            if because == "pageable" and moved and seconds and moved / item.calls > 1e6:
                reached, possible = moved / seconds / 1e9, ceilings.host_link_bytes_per_s / 1e9
                return f"{reached:.1f} of {possible:.0f} GB/s: pin_memory=True and non_blocking=True"
            waits = "DtoH" in item.link
            return "a synchronising copy: keep it out of the step" if waits else "small: send it with others"
    return f"not judged: {item.unknown}" if item.unknown else "not judged"


def _memory(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    if verdict.because == "caches":
        return "lives in the caches: reuse registers and shared memory, or fuse"
    if item.seconds is not None:
        if verdict.share is not None and verdict.share > 1:
            return "found part of its bytes in L2: nothing to gain"
        if verdict.share is not None and verdict.share >= AT_THE_CEILING:
            return "at the ceiling: move fewer bytes (fuse with its neighbours, narrower type)"
        return "short of the ceiling: contiguous inputs, 16-byte loads; or fuse (torch.compile)"
    # Predicted.
    if item.kind == "optimizer":
        return "8-bit states, or shard them (FSDP): it moves 28 bytes a parameter"
    if item.kind == "attention":
        return "reads the KV cache: FP8 cache, fewer KV heads, shorter contexts"
    intensity, ridge = item.work.intensity, ceilings.ridge(item.work.precision)
    if item.kind == "product" and intensity and ridge > intensity:
        times = f"{ridge / intensity:,.0f}" if ridge >= 10 * intensity else f"{ridge / intensity:.1f}"
        return f"{times} times the tokens would take no longer: batch them; or FP8 weights"
    return "fuse it with its neighbours (torch.compile)"


SLOW = 1.25  # times what the clock expects, which is itself off by about a tenth
_WORTH = 0.002  # of all time


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """A judged item; `seconds` is measured or the least possible, `expected_s` what the clock expects (None: unknown)."""

    item: Item
    verdict: Verdict
    seconds: float
    advice: str
    expected_s: float | None = None

    @property
    def slower(self) -> float | None:
        """Measured over expected time."""
        return self.seconds / self.expected_s if self.expected_s else None

    @property
    def lost_s(self) -> float:
        """Time beyond the least that its bound needs; 0 if that is unknown."""
        return 0.0 if self.verdict.bound is Bound.UNKNOWN else max(0.0, self.seconds - self.verdict.bound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A profile and its rows, the longest first."""

    profile: RooflineProfile
    ceilings: Ceilings
    rows: tuple[RooflineRow, ...]

    @property
    def measured(self) -> bool:
        """Whether times are measured, not predicted."""
        return self.profile.kind != "model"

    @property
    def seconds(self) -> float:
        """Seconds of all rows."""
        return sum(row.seconds for row in self.rows)

    def part(self, seconds: float) -> float:
        """Return the share of all rows' time."""
        return seconds / self.seconds if self.seconds else 0.0

    def seconds_by_bound(self) -> dict[Bound, float]:
        """Return the seconds of every class, most first, omitting empty ones."""
        sums = {bound: sum(row.seconds for row in self.rows if row.verdict.bound is bound) for bound in Bound}
        return {bound: sums[bound] for bound in sorted(sums, key=lambda bound: -sums[bound]) if sums[bound]}

    @property
    def expected(self) -> tuple[float, float]:
        """Return measured and expected seconds of the rows that the clock knows."""
        known = [row for row in self.rows if row.expected_s is not None]
        return sum(row.seconds for row in known), sum(row.expected_s or 0.0 for row in known)

    def slow_rows(self, least: float = SLOW) -> list[RooflineRow]:
        """Return rows slower than the clock expects, the largest excess first."""
        worth_s = _WORTH * self.seconds
        slow = [
            row
            for row in self.rows
            if row.expected_s and row.seconds > max(least * row.expected_s, row.expected_s + worth_s)
        ]
        return sorted(slow, key=lambda row: (row.expected_s or 0.0) - row.seconds)

    @property
    def host_s(self) -> float:
        """Host time to launch the kernels one by one."""
        return sum(row.item.launches for row in self.rows) * self.ceilings.launch_s


def analyse(profile: RooflineProfile, ceilings: Ceilings) -> Analysis:
    """Judge every item."""
    rows, tf32 = [], "tf32" in ceilings.rates
    for item in profile.items:
        work, card = item.work, ceilings.card
        # FP32 faster than the GPU's FP32 rate was TF32.
        rate = work.operations / item.seconds if work.operations and item.seconds else 0.0
        if work.precision == "fp32" and tf32 and rate > ceilings.rate("fp32"):
            item = replace(item, work=replace(work, precision="tf32"))
        verdict = judge(item, ceilings)
        seconds = verdict.bound_s if item.seconds is None else item.seconds
        known = item.seconds is not None and (item.made or item.link)
        expected = expected_s(item, card) if card is not None and known else None
        advice = advice_for(item, verdict, ceilings)
        rows.append(RooflineRow(item=item, verdict=verdict, seconds=seconds, advice=advice, expected_s=expected))
    rows.sort(key=lambda row: -row.seconds)
    return Analysis(profile=profile, ceilings=ceilings, rows=tuple(rows))


def expected_s(item: Item, gpu: Gpu) -> float | None:
    """Return the clock's seconds for all calls; None if they are not recorded or the clock does not know them."""
    from tonnage.clock import kernels  # imports numpy
    from tonnage.clock.kernels import copies

    total_s = 0.0
    try:
        if item.link and item.work.moved_bytes:
            direction = get_args(copies.Direction)["DtoH" in item.link]
            each = copies.transfer(item.work.moved_bytes / item.calls, direction, pinned="Pinned" in item.link)
            total_s = item.calls * float(kernels.seconds(each, gpu))
        for call, count in () if item.link else item.made:
            # Kernel names tell what they compute in.
            settings = Settings(tf32_matmul=any("tf32" in kernel for kernel in call.kernels))
            launch = kernels.launch_of(call, settings)
            if launch is None:
                return None
            total_s += count * float(kernels.seconds(launch, gpu))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # a trace may hold any numbers
    return total_s if isfinite(total_s) and total_s > 0 else None

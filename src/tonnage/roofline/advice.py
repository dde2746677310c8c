"""What a verdict suggests, in one line of text."""

from tonnage.roofline.ceilings import Ceilings
from tonnage.roofline.classes import Bound, Verdict
from tonnage.roofline.items import Item

# Above this share a better kernel gains little.
AT_THE_CEILING = 0.7


def advice_for(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    """Return the one thing to try first."""
    match verdict.bound:
        case Bound.MEMORY:
            return _memory(item, verdict, ceilings)
        case Bound.COMPUTE:
            return _compute(item, verdict, ceilings)
        case Bound.LATENCY:
            return _latency(item, verdict, ceilings)
        case Bound.LINK:
            return _link(item, verdict, ceilings)
        case Bound.UNKNOWN:
            return f"not judged: {item.unknown}" if item.unknown else "not judged"


def _memory(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    if verdict.because == "caches":
        return "lives in the caches: reuse registers and shared memory, or fuse"
    if item.seconds is None:
        return _predicted_memory(item, ceilings)
    if verdict.share is not None and verdict.share > 1:
        return "found part of its bytes in L2: nothing to gain"
    if verdict.share is not None and verdict.share >= AT_THE_CEILING:
        return "at the ceiling: move fewer bytes (fuse with its neighbours, narrower type)"
    return "short of the ceiling: contiguous inputs, 16-byte loads; or fuse (torch.compile)"


def _predicted_memory(item: Item, ceilings: Ceilings) -> str:
    if item.kind == "optimizer":
        return "8-bit states, or shard them (FSDP): it moves 28 bytes a parameter"
    if item.kind == "attention":
        return "reads the KV cache: FP8 cache, fewer KV heads, shorter contexts"
    intensity, ridge = item.work.intensity, ceilings.ridge(item.work.precision)
    if item.kind == "product" and intensity and ridge > intensity:
        times = f"{ridge / intensity:,.0f}" if ridge >= 10 * intensity else f"{ridge / intensity:.1f}"
        return f"{times} times the tokens would take no longer: batch them; or FP8 weights"
    return "fuse it with its neighbours (torch.compile)"


def _compute(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    precision = item.work.precision
    if verdict.because == "pipes":
        return "the SMs' pipes are busy: fewer or cheaper instructions; `ncu --set full` says which"
    if (
        verdict.because == "operations"
        and ceilings.has(precision) == "fp32"
        and ceilings.rate("tf32") > ceilings.rate("fp32")
    ):
        factor = ceilings.rate("tf32") / ceilings.rate("fp32")
        return f"plain FP32: TF32 allows {factor:.0f} times the rate (set_float32_matmul_precision)"
    if item.seconds is None:
        return "the best case: only fewer operations or a faster precision help"
    if verdict.share is not None and verdict.share >= AT_THE_CEILING:
        return "at the ceiling: only fewer operations or a faster precision help"
    return "short of the ceiling: sizes in multiples of 128, larger tiles"


def _latency(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    if verdict.because == "launch":
        return "over before the card is full: fuse it, batch it, or use a CUDA graph"
    if verdict.because == "blocks":
        return f"{item.blocks} blocks for {ceilings.sm_count} SMs: split the work finer"
    return "neither ceiling explains its time: `ncu --set full` says what it waits for"


def _link(item: Item, verdict: Verdict, ceilings: Ceilings) -> str:
    moved, seconds = item.work.moved_bytes, item.seconds
    if verdict.because == "pageable" and moved and seconds and moved / item.calls > 1e6:
        reached, possible = moved / seconds / 1e9, ceilings.host_link_bytes_per_s / 1e9
        return f"{reached:.1f} of {possible:.0f} GB/s: pin_memory=True and non_blocking=True"
    return "a synchronising copy: keep it out of the step" if "DtoH" in item.link else "small: send it with others"

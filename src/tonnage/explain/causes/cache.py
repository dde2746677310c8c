"""A KV cache that grows: without bound, longer at every iteration and never cut, or in `generate`.

Caches that grow by concatenation allocate a longer block and free the previous one, so nothing is kept twice; the sizes
show it.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise

from tonnage.explain.case import Case
from tonnage.explain.fixes import Finding, finding
from tonnage.explain.rewriting import Rewrite, resized
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_TURNS = 4
_MUCH_SHARE = 0.5
_FATAL_SHARE = 0.25
_BOUND_SHARE = 0.5
_AT_ONCE = 2  # layers whose cache is on the GPU while the others' is on the host
_HOW = "a static or sliding-window cache of half the length reached"


def unbounded_cache(case: Case) -> Finding | None:
    """Return the cache at the decisive moment, if it is large and has grown at every iteration."""
    cached = [a for a in case.live if _is_cached(a)]
    size = sum(a.block_bytes for a in cached)
    if size < (_FATAL_SHARE if case.death else _MUCH_SHARE) * case.peak_bytes:
        return None
    if sum(a.block_bytes for a in cached if a.phase == "generation") > size / 2:
        return None  # it is bounded by max_new_tokens
    # The cached bytes at the start of each iteration.
    starts = [start for start in case.turns if start <= case.moment]
    changes = [0] * (len(starts) + 1)
    for a in case.recording.allocations:
        if _is_cached(a):
            changes[bisect_right(starts, a.born - 1)] += a.block_bytes
            if a.died is not None and a.died <= case.moment:
                changes[bisect_right(starts, a.died - 1)] -= a.block_bytes
    levels = [level for level in accumulate(changes[:-1]) if level]
    # Levels rise in each quarter and never fall; rounding may make neighbours equal.
    quarters = [levels[(len(levels) - 1) * part // _TURNS] for part in range(_TURNS + 1) if levels]
    rises = all(before < after for before, after in pairwise(quarters))
    if len(levels) < _TURNS or not rises or levels != sorted(levels):
        return None
    each = (levels[-1] - levels[0]) // (len(levels) - 1)
    words = f"the KV cache holds {{size}} and grew by {format_bytes(each)} at every step"
    rewrite = _bounded(case, "bound the KV cache", "what lies further back", _HOW)
    return replace(finding(case, "unbounded-cache", words, cached, rewrite, cause="unbounded-cache"), waste_bytes=size)


def growing_generation(case: Case) -> Finding | None:
    """Return the cache of `generate` at its largest, its length, and its bytes per token up to `max_new_tokens`."""
    cached = [a for a in case.live_in(("generation",)) if a.category is Category.KV_CACHE]
    longest = max((a.shape for a in cached if a.shape and len(a.shape) == 4), key=lambda s: s[2], default=None)
    if not case.is_worth(cached) or longest is None or not longest[2]:
        return None
    sequences, tokens = longest[0], longest[2]
    each = format_bytes(sum(a.block_bytes for a in cached) // tokens)
    held = f"the KV cache of generate() holds {{size}} at {tokens:,} tokens of {sequences:,} sequences"
    words = f"{held}, {each} for each more of max_new_tokens"
    layers = max(1, len(cached) // 2)
    offloaded = resized(case.needed, lambda a: min(1.0, _AT_ONCE / layers) if _is_cached(a) else 1.0)
    how = 'generate(..., cache_implementation="offloaded")'
    offload = Rewrite("KV cache on the host", "copies at every token", how, offloaded)
    half = _bounded(case, "half the length", "half the tokens", "half of max_new_tokens, or of the sequences")
    return finding(case, "generation-cache", words, cached, offload, half, cause="generation")


def _is_cached(a: Allocation) -> bool:
    """Say whether a block belongs to a KV cache, or is concatenated like one."""
    joined = a.operator.removeprefix("aten::") == "cat" and a.phase in ("forward", "generation")
    return a.category is Category.KV_CACHE or (joined and a.category is Category.ACTIVATIONS)


def _bounded(case: Case, change: str, costs: str, how: str) -> Rewrite:
    """Return the run with a cache of half the length it reached."""
    longest = max((a.block_bytes for a in case.needed.allocations if _is_cached(a)), default=0)
    bound = int(_BOUND_SHARE * longest)
    smaller = resized(case.needed, lambda a: min(1.0, bound / a.block_bytes) if _is_cached(a) and bound else 1.0)
    return Rewrite(change, costs, how, smaller)

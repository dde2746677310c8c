"""An unbounded KV cache: it is longer at every iteration and never cut.

Caches that grow by concatenation allocate a longer block and free the previous one, so nothing is kept twice; the sizes
show it.
"""

from bisect import bisect_right
from itertools import accumulate, pairwise

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines
from tonnage.explain.fixes import fix_of
from tonnage.explain.rewriting import Rewrite, resized
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_TURNS = 4
_MUCH_SHARE = 0.5
_FATAL_SHARE = 0.25
_BOUND_SHARE = 0.5
_HOW = "a static or sliding-window cache of half the length reached"


def unbounded_cache(case: Case) -> Finding | None:
    """Return the cache at the decisive moment, if it is large and has grown at every iteration."""
    cached = [a for a in case.live if is_cached(a)]
    size = sum(a.block_bytes for a in cached)
    if size < (_FATAL_SHARE if case.death else _MUCH_SHARE) * case.peak_bytes:
        return None
    if sum(a.block_bytes for a in cached if a.phase == "generation") > size / 2:
        return None  # it is bounded by max_new_tokens
    levels = _levels(case)
    if not _always_grew(levels):
        return None
    each = (levels[-1] - levels[0]) // (len(levels) - 1)
    sentence = f"the KV cache holds {format_bytes(size)} and grew by {format_bytes(each)} at every step"
    fixes = tuple(
        filter(None, [fix_of(case.needed, bounded(case, "bound the KV cache", "what lies further back", _HOW))])
    )
    return Finding("unbounded-cache", sentence, size, "unbounded-cache", size, guilty_lines(cached), fixes)


def is_cached(a: Allocation) -> bool:
    """Say whether a block belongs to a KV cache, or is concatenated like one."""
    joined = a.operator.removeprefix("aten::") == "cat" and a.phase in ("forward", "generation")
    return a.category is Category.KV_CACHE or (joined and a.category is Category.ACTIVATIONS)


def _levels(case: Case) -> list[int]:
    """Return the cached bytes at the start of each iteration."""
    starts = [start for start in case.turns if start <= case.moment]
    changes = [0] * (len(starts) + 1)
    for a in case.recording.allocations:
        if is_cached(a):
            changes[bisect_right(starts, a.born - 1)] += a.block_bytes
            if a.died is not None and a.died <= case.moment:
                changes[bisect_right(starts, a.died - 1)] -= a.block_bytes
    return [level for level in accumulate(changes[:-1]) if level]


def _always_grew(levels: list[int]) -> bool:
    """Say whether levels rise in each quarter and never fall; rounding may make neighbours equal."""
    if len(levels) < _TURNS or any(after < before for before, after in pairwise(levels)):
        return False
    quarters = [levels[(len(levels) - 1) * part // _TURNS] for part in range(_TURNS + 1)]
    return all(after > before for before, after in pairwise(quarters))


def bounded(case: Case, change: str, costs: str, how: str) -> Rewrite:
    """Return the run with a cache of half the length it reached."""
    longest = max((a.block_bytes for a in case.needed.allocations if is_cached(a)), default=0)
    bound = int(_BOUND_SHARE * longest)
    smaller = resized(case.needed, lambda a: min(1.0, bound / a.block_bytes) if is_cached(a) and bound else 1.0)
    return Rewrite(change, costs, how, smaller)

"""Generation: a KV cache that grows by one token per sequence at each step, up to `max_new_tokens`."""

from tonnage.explain.case import Case
from tonnage.explain.causes.cache import bounded, is_cached
from tonnage.explain.findings import Finding, guilty_lines
from tonnage.explain.fixes import fix_of
from tonnage.explain.phases import is_worth, live_in, waste_of
from tonnage.explain.rewriting import Rewrite, resized
from tonnage.ledger import Category
from tonnage.units import format_bytes

_GENERATION = ("generation",)
_AT_ONCE = 2  # layers whose cache is on the GPU while the others' is on the host


def growing_generation(case: Case) -> Finding | None:
    """Return the cache at its largest, its length, and its bytes per token."""
    cached = [a for a in live_in(case, _GENERATION) if a.category is Category.KV_CACHE]
    size = sum(a.block_bytes for a in cached)
    longest = max((a.shape for a in cached if a.shape and len(a.shape) == 4), key=lambda s: s[2], default=None)
    if not is_worth(case, size) or longest is None or not longest[2]:
        return None
    sequences, tokens = longest[0], longest[2]
    sentence = (
        f"the KV cache of generate() holds {format_bytes(size)} at {tokens:,} tokens of {sequences:,} sequences, "
        f"{format_bytes(size // tokens)} for each more of max_new_tokens"
    )
    layers = max(1, len(cached) // 2)
    offloaded = resized(case.needed, lambda a: min(1.0, _AT_ONCE / layers) if is_cached(a) else 1.0)
    how = 'generate(..., cache_implementation="offloaded")'
    offload = Rewrite("KV cache on the host", "copies at every token", how, offloaded)
    half = bounded(case, "half the length", "half the tokens", "half of max_new_tokens, or of the sequences")
    fixes = tuple(filter(None, (fix_of(case.needed, rewrite) for rewrite in (offload, half))))
    waste = waste_of(case, cached)
    return Finding("generation-cache", sentence, size, "generation", waste, guilty_lines(cached), fixes)

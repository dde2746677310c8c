"""Gradients that live through the forward after a step: `zero_grad(set_to_none=False)`, or none at all."""

from collections import Counter

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines
from tonnage.explain.rewrites import free_gradients
from tonnage.units import format_bytes

_WORTH_SHARE = 0.02


def kept_gradients(case: Case) -> Finding | None:
    """Gradients in the forward that follows an optimizer's step; freeing them is among the fixes that are tried."""
    freed = free_gradients(case.needed)
    if freed is None:
        return None
    # Freeing a gradient for a while makes two lives of one.
    lives = Counter(a.index for a in freed.allocations)
    kept = [a for a in case.needed.allocations if lives[a.index] > 1]
    size = sum(a.block_bytes for a in kept)
    if size < _WORTH_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(kept)
    sentence = f"gradients of {format_bytes(size)} stay through the next forward: zero_grad(set_to_none=False)"
    return Finding("kept-gradients", sentence, size, lines=lines)

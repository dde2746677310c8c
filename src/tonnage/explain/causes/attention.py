"""Quadratic masks and attention matrices: tensors whose last two dimensions are the same long length."""

from collections.abc import Callable
from math import prod

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.rewriting import Rewrite
from tonnage.explain.words import attention_words, is_of_sdpa
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_LONG = 512
_WORTH_SHARE = 0.05
_MEANT = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)


def attention_matrices(case: Case) -> Finding | None:
    """Return their bytes, and what fused attention, which does not create them, would save."""
    is_square = _square_test(case.needed.allocations)
    square = [a for a in case.live if is_square(a)]
    size = sum(a.block_bytes for a in square)
    if size < _WORTH_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(square)
    length = max(a.shape[-1] for a in square if a.shape)
    sentence = f"attention matrices and masks of {length} × {length} hold {format_bytes(size)}{lines_words(lines)}"
    if any(map(is_of_sdpa, square)):  # SDPA is already used, but has no fused kernel for this dtype
        return Finding(
            "attention-matrices", f"{sentence}: in 32 bits there is no fused kernel for it", size, lines=lines
        )
    kept = [a for a in case.needed.allocations if not is_square(a)]
    rewrite = Rewrite("fused attention", "nothing, it is faster", attention_words(case.needed), kept)
    fix = fix_of(case.needed, rewrite)
    return Finding("attention-matrices", sentence, size, lines=lines, fixes=(fix,) if fix else ())


def _square_test(allocations: list[Allocation]) -> Callable[[Allocation], bool]:
    """Return a test for masks and matrices of attention.

    A softmax over a square belongs to attention and gives the number of heads: without it, images and hidden states
    that happen to be square would count.
    """
    softmaxes = {_matrices(a.shape) for a in allocations if "softmax" in a.operator and _is_long(a.shape)}

    def is_square(a: Allocation) -> bool:
        if a.category in _MEANT or not _is_long(a.shape):
            return False
        assert a.shape
        is_mask = a.dtype == "bool" or (len(a.shape) == 4 and a.shape[1] == 1)
        return is_mask or _matrices(a.shape) in softmaxes

    return is_square


def _is_long(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) > 1 and shape[-1] == shape[-2] >= _LONG


def _matrices(shape: tuple[int, ...] | None) -> tuple[int, int]:
    """Return count and length of the matrices: heads may be their own dimension or part of the first."""
    assert shape
    return prod(shape[:-2]), shape[-1]

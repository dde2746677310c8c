"""Logits in FP32: tensors as wide as a vocabulary, in four bytes an element, at the moment that matters."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_VOCABULARY_AT_LEAST = 16384
_WORTH_SHARE = 0.05


def wide_logits(case: Case) -> Finding | None:
    """The FP32 ones' bytes; the chunked loss is among the fixes that are tried on every recording."""
    wide = [a for a in case.live if _is_wide(a)]
    size = sum(a.block_bytes for a in wide)
    if size < _WORTH_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(wide)
    sentence = f"logits in float32 hold {format_bytes(size)}{lines_words(lines)}"
    return Finding("fp32-logits", sentence, size, lines=lines)


def _is_wide(a: Allocation) -> bool:
    shape = a.shape or ()
    batched = a.category not in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
    return batched and a.dtype == "float32" and len(shape) > 1 and shape[-1] >= _VOCABULARY_AT_LEAST

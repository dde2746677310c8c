"""Optimizer temporaries: lists as large as the states, alive while the optimizer steps at the peak."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_WORTH_SHARE = 0.05
_MEANT = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)


def optimizer_temporaries(case: Case) -> Finding | None:
    """Their bytes at the moment that matters; a fused step is among the fixes that are tried on every recording."""
    temporaries = [a for a in case.live if _is_temporary(a)]
    size = sum(a.block_bytes for a in temporaries)
    if size < _WORTH_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(temporaries)
    sentence = f"the optimizer's step makes temporaries of {format_bytes(size)}{lines_words(lines)}"
    return Finding("optimizer-temporaries", sentence, size, lines=lines)


def _is_temporary(a: Allocation) -> bool:
    return a.phase == "optimizer" and a.category not in _MEANT

"""One tensor that is much of all there is: a request nobody expects among the others."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, Guilty, tensor_words
from tonnage.ledger import Category
from tonnage.units import format_bytes

_MUCH_SHARE = 0.3
_TIMES_THE_NEXT = 4
_EXPECTED = (Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.EARLIER)


def surprising_tensor(case: Case) -> Finding | None:
    """The largest block, if it is a third of the whole and far larger than what else there is."""
    others = [a for a in case.live if a.category not in _EXPECTED]
    if not others:
        return None
    ranked = sorted(others, key=lambda a: -a.block_bytes)
    largest = ranked[0]
    next_bytes = ranked[1].block_bytes if len(ranked) > 1 else 0
    if largest.block_bytes < max(_MUCH_SHARE * case.peak_bytes, _TIMES_THE_NEXT * next_bytes):
        return None
    size, words = largest.block_bytes, tensor_words(largest)
    share = 100 * size // case.peak_bytes
    at = f", at {largest.line}" if largest.line else ""
    sentence = f"one tensor is {share} % of all that was needed: {format_bytes(size)}, {words}{at}"
    return Finding("surprising-tensor", sentence, size, lines=(Guilty(largest.line, size, 1, words),))

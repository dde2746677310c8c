"""A graph without a backward: what forward keeps, in a snapshot where no backward follows."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.words import trains
from tonnage.ledger import Category
from tonnage.units import format_bytes

_WORTH_SHARE = 0.1
_LINES = 4  # one line's blocks may be outputs that are kept on purpose


def graph_without_backward(case: Case) -> Finding | None:
    """Activations that are still there at the end of a recording of forwards alone."""
    if case.recording.header.source != "snapshot" or case.death or trains(case.recording):
        return None
    kept = [a for a in case.live if a.category is Category.ACTIVATIONS and a.died is None]
    size = sum(a.block_bytes for a in kept)
    if size < _WORTH_SHARE * case.peak_bytes or len({a.line for a in kept}) < _LINES:
        return None
    lines = guilty_lines(kept)
    sentence = (
        f"{format_bytes(size)} of activations are kept as for a backward, most{lines_words(lines)}, and the recording has "
        "none: if none is to come, with torch.inference_mode(): frees them"
    )
    return Finding("graph-without-backward", sentence, size, lines=lines)

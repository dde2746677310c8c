"""What was there when it died, or at the peak: the largest terms, whatever the cause is."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.ledger import Ledger
from tonnage.units import format_bytes


def capacity(case: Case) -> Finding | None:
    """The largest categories and lines at the moment that matters."""
    if not case.live:
        return None
    ledger = Ledger.of((a.category, a.block_bytes) for a in case.live)
    total = ledger.total_bytes
    category, largest_bytes = next(ledger.ranked())
    lines = guilty_lines(case.live)
    share = f"{category.label} are {format_bytes(largest_bytes)} of it"
    when = "were needed when it died" if case.death else "at the peak"
    sentence = f"{format_bytes(total)} {when}; {share}, most{lines_words(lines)}"
    if case.death is None:
        return Finding("peak", sentence, total, lines=lines)
    return Finding("capacity", sentence, total, "capacity", lines=lines)

"""What was there when it died, or at the peak: the largest terms, whatever the cause is."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.ledger import Category, Ledger
from tonnage.units import format_bytes


def capacity(case: Case) -> Finding | None:
    """The largest categories and lines at the moment that matters."""
    if not case.live:
        return None
    ledger = Ledger.of((a.category, a.block_bytes) for a in case.live)
    total = ledger.total_bytes
    lines = guilty_lines(case.live)
    when = "were needed when it died" if case.death else "at the peak"
    category, size_bytes = next(ledger.ranked())
    # Older blocks have no lines: where they are most of it, no line is.
    known = [a for a in case.live if a.line and category in (a.category, Category.EARLIER)]
    is_most = category is Category.EARLIER or 2 * sum(a.block_bytes for a in known) > size_bytes
    where = lines_words(guilty_lines(known)) if is_most else ""
    sentence = f"{format_bytes(total)} {when}; {_largest_words(category, size_bytes, where)}"
    if case.death is None:
        return Finding("peak", sentence, total, lines=lines)
    return Finding("capacity", sentence, total, "capacity", lines=lines)


def _largest_words(category: Category, size_bytes: int, where: str) -> str:
    """What most of it is for, and where most was made."""
    size, most = format_bytes(size_bytes), "most"
    if category is Category.EARLIER:
        words, most = f"{size} of it are older than the recording", "most of the rest"
    elif category is Category.OTHER:
        words = f"what {size} of it are for is not known"
    else:
        words = f"{category.label} are {size} of it"
    return f"{words}, {most}{where}" if where else words

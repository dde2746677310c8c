"""The largest memory users at the failure or the peak, whatever the cause.

Also a limit set by the process itself (`set_per_process_memory_fraction`), which refused memory that the card still
had.
"""

from tonnage.explain.case import OWN_LIMIT, Case, is_limited_by_itself
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import Fix
from tonnage.ledger import Category, Ledger
from tonnage.units import format_bytes


def capacity(case: Case) -> Finding | None:
    """Return the largest categories and lines at the decisive moment."""
    if not case.live:
        return None
    ledger = Ledger.of((a.category, a.block_bytes) for a in case.live)
    total = ledger.total_bytes
    lines = guilty_lines(case.live)
    when = "were needed when it died" if case.death else "at the peak"
    category, size_bytes = next(ledger.ranked())
    # Older blocks have no lines: if they dominate, no line is named.
    known = [a for a in case.live if a.line and category in (a.category, Category.EARLIER)]
    is_most = category is Category.EARLIER or 2 * sum(a.block_bytes for a in known) > size_bytes
    where = lines_words(guilty_lines(known)) if is_most else ""
    sentence = f"{format_bytes(total)} {when}; {_largest_words(category, size_bytes, where)}"
    if case.death is None:
        return Finding("peak", sentence, total, lines=lines)
    return Finding("capacity", sentence, total, "capacity", lines=lines)


def _largest_words(category: Category, size_bytes: int, where: str) -> str:
    """Describe the largest category, and where most of it was allocated."""
    size, most = format_bytes(size_bytes), "most"
    if category is Category.EARLIER:
        words, most = f"{size} of it are older than the recording", "most of the rest"
    elif category is Category.OTHER:
        words = f"what {size} of it are for is not known"
    else:
        words = f"{category.label} are {size} of it"
    return f"{words}, {most}{where}" if where else words


def own_limit(case: Case) -> Finding | None:
    """Return the process's own limit, if the failed request met it before the card's."""
    death = case.death
    if death is None or not is_limited_by_itself(case.recording):
        return None
    noted = next((note for note in case.recording.notes if note.operator == OWN_LIMIT), None)
    limit = death.reserved_bytes + death.free_bytes
    beyond = noted.text.partition("; ")[2] if noted else f"the device had {format_bytes(death.device_free_bytes)} free"
    sentence = f"a limit that the process set itself allows {format_bytes(limit)}; {beyond}"
    how = "a larger torch.cuda.set_per_process_memory_fraction(), or none"
    return Finding("own-limit", sentence, limit, fixes=(Fix("a higher limit", 0, "nothing", how, True),))

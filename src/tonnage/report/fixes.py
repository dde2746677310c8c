"""Memory-saving changes as a table: what, how much it saves, what it costs, and how to do it. They come ranked."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.text import Text

from tonnage.explain import Fix
from tonnage.report.lines import report_width, wrapped
from tonnage.units import format_bytes

_CHANGE = 28
_SAVES = 11
_COSTS = 15


def fix_lines(title: str, fixes: Sequence[Fix], *, how_below: bool = False) -> Iterator[Text]:
    """Yield a heading, then the changes; nothing if there are none. "✓": a run that failed fits with it.

    How to make a change follows on the same line if it fits, unless `how_below`.
    """
    if not fixes:
        return
    # As wide as the longest name needs, if there is room for the cost.
    width = min(max(_CHANGE, *(len(fix.change) + 1 for fix in fixes)), report_width() - 3 - _SAVES - 3 - _COSTS)
    before_how = 3 + width + _SAVES + 3 + max(_COSTS, *(len(fix.costs) for fix in fixes))
    yield Text(f"  {title:<{width + 1}}{'saves':>{_SAVES}}   costs", style="bold")
    for fix in fixes:
        rows = list(_rows(fix, width))
        how = f"{fix.how}   (run, not computed)" if fix.was_run else fix.how
        row = f"{rows[0]:<{before_how}}  {how}"
        if not how_below and len(rows) == 1 and len(row) <= report_width():
            yield Text(row.rstrip())
            continue
        yield from map(Text, rows)
        yield from (Text(line, style="dim") for line in wrapped(how, first="     "))


def _rows(fix: Fix, width: int) -> Iterator[str]:
    mark = {True: "✓", False: "✗", None: " "}[fix.rescues]
    saves = format_bytes(fix.saves_bytes) if fix.saves_bytes else "–"
    changes = wrapped(fix.change, first=f" {mark} ", rest="   ", width=3 + width)
    costs = wrapped(fix.costs, first="", width=report_width() - 3 - width - _SAVES - 3)
    for number, (change, cost) in enumerate(zip_longest(changes, costs, fillvalue="")):
        yield f"{change:<{3 + width}}{'' if number else saves:>{_SAVES}}   {cost}".rstrip()

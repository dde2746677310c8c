"""What grew from one run to another, for people in 80 columns and for programs. Nothing is computed here but layout."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.text import Text

from tonnage.explain.diff import Difference, Growth, GrowthLimit
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.report.lines import WIDTH, clip, clip_start, column, print_sections, spread, table_unit
from tonnage.units import format_bytes

_NAME_CELLS = 34
_Names = tuple[str, str]
_Runs = tuple[Recording, Recording]


def print_difference(
    names: _Names,
    runs: _Runs,
    difference: Difference,
    limit: GrowthLimit | None,
    failed: bool,
    *,
    stream: TextIO,
    rows: int,
) -> None:
    """The peaks, then what changed in each table."""
    unit = table_unit(max(growth.after_bytes for growth in difference.peaks))
    sections = [
        _headline(names, runs, difference),
        _table("peak", difference.peaks, unit, len(difference.peaks)),
        _table("at the peak, by category", _labelled(difference.categories), unit, rows),
        _table("by module", difference.modules, unit, rows),
        _table("by line", difference.lines, unit, rows),
        _verdict(difference, limit, failed),
    ]
    print_sections(sections, stream)


def _headline(names: _Names, runs: _Runs, difference: Difference) -> Iterator[Text]:
    grew = difference.peaks[0].grew_bytes
    words = "no change" if not grew else f"{signed(grew)} ({percent(difference.peaks[0])})"
    yield spread(Text(clip("  allocated, at the peak", WIDTH), style="bold"), Text(words, _style(grew)))
    for letter, name, run in zip("AB", names, runs, strict=True):
        header = run.header
        card = " · ".join(filter(None, [header.gpu_name, header.source, header.outcome]))
        yield Text(clip(f"  {letter}  {clip_start(name, 34):<34}  {card}", WIDTH))


def _table(title: str, growths: Sequence[Growth], unit: str, rows: int) -> Iterator[Text]:
    """Entries that changed, and how many did not; nothing where there is nothing to tell apart."""
    if [growth.name for growth in growths] in ([], [""]):
        return
    yield Text(f"  {title:<{_NAME_CELLS}}{'A':>11}{'B':>12}{'grew':>13}", style="bold")
    for growth in growths[:rows]:
        name = clip_start(growth.name or "elsewhere", _NAME_CELLS - 1)
        sizes = f"{column(growth.before_bytes, unit)} {column(growth.after_bytes, unit)}"
        row = Text(f"  {name:<{_NAME_CELLS}}{sizes}")
        yield row + Text(f"{signed(growth.grew_bytes, unit):>13}", _style(growth.grew_bytes))
    rest = growths[rows:]
    if rest:
        yield Text(f"  and {len(rest)} more, together {signed(sum(g.grew_bytes for g in rest))}: --rows", style="dim")


def _labelled(growths: Sequence[Growth]) -> list[Growth]:
    return [Growth(Category(g.name).label, g.before_bytes, g.after_bytes) for g in growths]


def _verdict(difference: Difference, limit: GrowthLimit | None, failed: bool) -> Iterator[Text]:
    if limit is None:
        return
    growth = difference.largest_growth
    words = f"{growth.name} memory grew by {signed(growth.grew_bytes)} ({percent(growth)})"
    if failed:
        yield Text(f"  {words}: more than {limit.text}", style="bold red")
        worst = next((line for line in difference.lines if line.grew_bytes > 0), None)
        if worst:
            yield Text(f"  look at {worst.name or 'what has no line'}: {signed(worst.grew_bytes)}")
        return
    yield Text(f"  {words}: within {limit.text}", style="green")


def signed(size_bytes: int, unit: str | None = None) -> str:
    """A change of size: "+1.50 GiB", "-1.50 GiB", or a dash."""
    words = format_bytes(size_bytes, unit)
    if unit and size_bytes and words.lstrip("-").startswith("0.00"):
        words = format_bytes(size_bytes)
    return f"+{words}" if size_bytes > 0 else words if size_bytes else "–"


def percent(growth: Growth) -> str:
    """The same in percent of what was there before."""
    return f"{100 * growth.grew_bytes / growth.before_bytes:+.1f} %" if growth.before_bytes else "from nothing"


def _style(grew_bytes: int) -> str:
    return "red" if grew_bytes > 0 else "green" if grew_bytes < 0 else ""


def diff_figures(
    names: _Names, runs: _Runs, difference: Difference, limit: GrowthLimit | None, failed: bool
) -> dict[str, object]:
    """The keys that scripts rely on; every size is in bytes."""
    return {
        "a": _run_figures(names[0], runs[0]),
        "b": _run_figures(names[1], runs[1]),
        "peaks": _growths(difference.peaks),
        "categories": _growths(difference.categories),
        "modules": _growths(difference.modules),
        "lines": _growths(difference.lines),
        "fail_above": limit.text if limit else None,
        "failed": failed,
    }


def _run_figures(name: str, run: Recording) -> dict[str, object]:
    header = run.header
    return {"file": name, "gpu": header.gpu_name, "source": header.source, "outcome": header.outcome}


def _growths(growths: Sequence[Growth]) -> list[dict[str, object]]:
    return [
        {"name": g.name, "before_bytes": g.before_bytes, "after_bytes": g.after_bytes, "grew_bytes": g.grew_bytes}
        for g in growths
    ]

"""What grew from one run to another, as text and as JSON values. It only formats."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.text import Text

from tonnage.explain.diff import Growth, GrowthLimit, RunDifference
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.report.lines import beside, column, cut, print_sections, report_width, spread, table_unit, wrapped
from tonnage.units import format_bytes, percent

_NAME_CELLS = 34
_BESIDE = ("setup", "other")
_SIZE_CELLS = 11 + 1 + 11 + 13
_Names = tuple[str, str]
_Runs = tuple[Recording, Recording]


def print_difference(
    names: _Names,
    runs: _Runs,
    difference: RunDifference,
    limit: GrowthLimit | None,
    failed: bool,
    *,
    stream: TextIO,
    rows: int,
) -> None:
    """Print the peaks, then what changed in each table."""
    unit = table_unit(max(growth.after_bytes for growth in difference.peaks))
    phases = [growth for growth in difference.phases if growth.name not in _BESIDE]
    sections = [
        _headline(names, runs, difference),
        _table("peak", difference.peaks, unit, len(difference.peaks)),
        _table("peak of each phase", phases, unit, len(phases)),
        _table("at the peak, by category", labelled(difference.categories), unit, rows),
        _table("by module", difference.modules, unit, rows),
        _table("by line", difference.lines, unit, rows),
        _verdict(difference, limit, failed),
    ]
    print_sections(sections, stream)


def _headline(names: _Names, runs: _Runs, difference: RunDifference) -> Iterator[Text]:
    grew = difference.peaks[0].grew_bytes
    words = "no change" if not grew else f"{signed(grew)} ({growth_percent(difference.peaks[0])})"
    yield from spread(Text("  allocated, at the peak", style="bold"), Text(words, _style(grew)))
    cells = min(max(map(len, names)), report_width() // 2)
    for letter, name, run in zip("AB", names, runs, strict=True):
        header = run.header
        card = " · ".join(filter(None, [header.gpu_name, header.source, header.outcome]))
        yield from map(Text, wrapped(f"{cut(name, cells):<{cells}}  {card}", first=f"  {letter}  "))


def _table(title: str, growths: Sequence[Growth], unit: str, rows: int) -> Iterator[Text]:
    """Yield entries that changed, and how many did not; nothing if there is nothing to distinguish."""
    if [growth.name for growth in growths] in ([], [""]):
        return
    longest = max(len(growth.name) + 1 for growth in growths[:rows])
    cells = min(max(_NAME_CELLS, longest), report_width() - 2 - _SIZE_CELLS)
    yield from (Text(line, style="bold") for line in beside(title, cells, f"{'A':>11}{'B':>12}{'grew':>13}"))
    for growth in growths[:rows]:
        name = cut(growth.name or "elsewhere", cells - 1)
        sizes = f"{column(growth.before_bytes, unit)} {column(growth.after_bytes, unit)}"
        row = Text(f"  {name:<{cells}}{sizes}")
        yield row + Text(f"{signed(growth.grew_bytes, unit):>13}", _style(growth.grew_bytes))
    rest = growths[rows:]
    if rest:
        yield Text(f"  and {len(rest)} more, together {signed(sum(g.grew_bytes for g in rest))}: --rows", style="dim")


def labelled(growths: Sequence[Growth]) -> list[Growth]:
    """Replace category keys by their labels."""
    return [Growth(Category(g.name).label, g.before_bytes, g.after_bytes) for g in growths]


def _verdict(difference: RunDifference, limit: GrowthLimit | None, failed: bool) -> Iterator[Text]:
    if limit is None:
        return
    growth = difference.largest_growth
    words = f"{growth.name} memory grew by {signed(growth.grew_bytes)} ({growth_percent(growth)})"
    if failed:
        yield from (Text(line, style="bold red") for line in wrapped(f"{words}: more than {limit.text}"))
        worst = next((line for line in difference.lines if line.grew_bytes > 0), None)
        if worst:
            yield from map(Text, wrapped(f"look at {worst.name or 'what has no line'}: {signed(worst.grew_bytes)}"))
        return
    yield from (Text(line, style="green") for line in wrapped(f"{words}: within {limit.text}"))


def signed(size_bytes: int, unit: str | None = None) -> str:
    """Format a change of size: "+1.50 GiB", "-1.50 GiB", or a dash."""
    words = format_bytes(size_bytes, unit)
    if unit and size_bytes and words.lstrip("-").startswith("0.00"):
        words = format_bytes(size_bytes)
    return f"+{words}" if size_bytes > 0 else words if size_bytes else "–"


def growth_percent(growth: Growth) -> str:
    """Format a change of size as a percentage of the size before."""
    if not growth.before_bytes:
        return "from nothing"
    return f"{'+' * (growth.grew_bytes >= 0)}{percent(growth.grew_bytes / growth.before_bytes)}"


def _style(grew_bytes: int) -> str:
    return "red" if grew_bytes > 0 else "green" if grew_bytes < 0 else ""


def diff_figures(
    names: _Names, runs: _Runs, difference: RunDifference, limit: GrowthLimit | None, failed: bool
) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    return {
        "a": _run_figures(names[0], runs[0]),
        "b": _run_figures(names[1], runs[1]),
        "peaks": _growths(difference.peaks),
        "phases": _growths(difference.phases),
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

"""What grew from one run to another, as text and as JSON values. It only formats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.text import Text

from tonnage.explain.diff import Growth, GrowthLimit, RunDifference
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.report.lines import beside, column, cut, picked, print_sections, report_width, said, spread, table_unit
from tonnage.units import format_bytes, percent
from tonnage.untrusted import printable

_NAME_CELLS = 34
_BESIDE = ("setup", "other")
_SIZE_CELLS = 11 + 1 + 11 + 13
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Two runs with their names, what grew between them, and the limit, if there is one, and whether it was passed."""

    names: tuple[str, str]
    runs: tuple[Recording, Recording]
    difference: RunDifference
    limit: GrowthLimit | None = None
    failed: bool = False


def print_difference(compared: ComparedRuns, *, stream: TextIO, rows: int) -> None:
    """Print the peaks, then what changed in each table, and whether it is within the limit."""
    names, difference, limit = compared.names, compared.difference, compared.limit
    unit = table_unit(max(growth.after_bytes for growth in difference.peaks))
    phases = [growth for growth in difference.phases if growth.name not in _BESIDE]
    # The headline.
    first = difference.peaks[0]
    words = f"{signed(first.grew_bytes)} ({growth_percent(first)})" if first.grew_bytes else "no change"
    head = list(spread(Text("  allocated, at the peak", style="bold"), Text(words, _style(first.grew_bytes))))
    cells = min(max(map(len, names)), report_width() // 2)
    for letter, name, run in zip("AB", names, compared.runs, strict=True):
        card = " · ".join(filter(None, [run.header.gpu_name, run.header.source, run.header.outcome]))
        head += said(f"{cut(name, cells):<{cells}}  {card}", first=f"  {letter}  ")
    # The verdict: the peak, of allocated or reserved memory, that grew more.
    verdict: list[Text] = []
    growth = max(difference.peaks[:2], key=lambda peak: peak.grew_bytes)
    words = f"{growth.name} memory grew by {signed(growth.grew_bytes)} ({growth_percent(growth)})"
    worst = next((line for line in difference.lines if line.grew_bytes > 0), None)
    if limit is not None and compared.failed:
        verdict += said(f"{words}: more than {limit.text}", "bold red")
        verdict += said(f"look at {worst.name or 'what has no line'}: {signed(worst.grew_bytes)}") if worst else ()
    elif limit is not None:
        verdict += said(f"{words}: within {limit.text}", "green")
    sections = [
        head,
        _table("peak", difference.peaks, unit, len(difference.peaks)),
        _table("peak of each phase", phases, unit, len(phases)),
        _table("at the peak, by category", labelled(difference.categories), unit, rows),
        _table("by module", difference.modules, unit, rows),
        _table("by line", difference.lines, unit, rows),
        verdict,
    ]
    print_sections(sections, stream)


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
    if rest := growths[rows:]:
        yield Text(f"  and {len(rest)} more, together {signed(sum(g.grew_bytes for g in rest))}: --rows", style="dim")


def labelled(growths: Sequence[Growth]) -> list[Growth]:
    """Replace category keys by their labels."""
    return [Growth(Category(g.name).label, g.before_bytes, g.after_bytes) for g in growths]


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


def diff_figures(compared: ComparedRuns) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    figures: dict[str, object] = {}
    for letter, name, run in zip("ab", compared.names, compared.runs, strict=True):
        figures[letter] = {"file": name, **picked(run.header, "gpu:gpu_name source outcome")}
    for name in ("peaks", "phases", "categories", "modules", "lines"):
        growths = getattr(compared.difference, name)
        figures[name] = [picked(growth, "name before_bytes after_bytes grew_bytes") for growth in growths]
    return figures | {"fail_above": compared.limit.text if compared.limit else None, "failed": compared.failed}


def markdown_difference(compared: ComparedRuns, *, rows: int) -> str:
    """Return the peaks as a table, and the rest collapsed."""
    difference, limit = compared.difference, compared.limit
    names = [name.removesuffix(".tonnage") for name in compared.names]
    grew, after = difference.peaks[0], compared.runs[1].header
    words = f"{signed(grew.grew_bytes)} ({growth_percent(grew)})" if grew.grew_bytes else "No change"
    judged = "" if limit is None else f", more than {limit.text}" if compared.failed else f", within {limit.text}"
    lines = [f"### GPU memory of {code(after.program)} on {after.gpu_name}", ""]
    lines += [f"**{words}** at the peak of allocated memory{judged}.", ""]
    for name, run in zip(names, compared.runs, strict=True):
        if run.header.outcome != "ok":
            died = f"runs out of memory at {code(run.oom.line)}" if run.oom else "fails for reasons of its own"
            lines += [f"{name} {died}: it is compared up to there.", ""]
    lines += _markdown_table("peak", names, difference.peaks, len(difference.peaks))
    lines += ["", "<details><summary>By category, module and line</summary>", ""]
    tables = {"category": labelled(difference.categories), "module": difference.modules, "line": difference.lines}
    for title, growths in tables.items():
        changed = [growth for growth in growths if growth.grew_bytes]
        if [growth.name for growth in changed] not in ([], [""]):
            lines += [*_markdown_table(title, names, changed, rows), ""]
    return "\n".join([*lines, "</details>", ""])


def code(name: str) -> str:
    """Format a name as inline code."""
    plain = printable(name).replace("`", "'").replace("|", "\\|") or "elsewhere"
    return f"`{plain if len(plain) <= _LONGEST_NAME else plain[:_LONGEST_NAME] + '…'}`"


def _markdown_table(title: str, names: Sequence[str], growths: Sequence[Growth], rows: int) -> Iterator[str]:
    yield f"| {title} | {names[0]} | {names[1]} | change |"
    yield "|---|--:|--:|--:|"
    for growth in growths[:rows]:
        change = f"{signed(growth.grew_bytes)} ({growth_percent(growth)})" if growth.grew_bytes else "–"
        sizes = f"{format_bytes(growth.before_bytes)} | {format_bytes(growth.after_bytes)}"
        yield f"| {code(growth.name)} | {sizes} | {change} |"
    if rest := growths[rows:]:
        yield f"| and {len(rest)} more | | | {signed(sum(growth.grew_bytes for growth in rest))} |"

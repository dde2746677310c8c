"""Building blocks of reports: bars, shortened names, wrapped sentences and tables of terminal reports; values of JSON.

A report is as wide as the terminal, or 80 columns without one; COLUMNS overrides both. Sentences and hints are wrapped
(`wrapped`, `beside`); only names and paths are shortened, in the middle (`cut`), so that their ends remain.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TextIO

from tonnage.units import GIB, format_bytes, percent

if TYPE_CHECKING:
    # Imported where it is used: importing it takes longer than a plan.
    from rich.text import Text

_USUAL = 80
# Minimum width of a layout; a narrower terminal wraps lines itself.
_NARROWEST = 60
_NARROWEST_NAME = 10
_NARROWEST_BAR, _WIDEST_BAR = 8, 60
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def report_width() -> int:
    """Return the width of a report in columns."""
    return max(_NARROWEST, shutil.get_terminal_size((_USUAL, 24)).columns)


def print_sections(sections: "Iterable[Iterable[Text | str]]", stream: TextIO) -> None:
    """Print sections with blank lines around them, skipping empty ones."""
    print_lines(["", *spaced(*sections), ""], stream)


def spaced(*sections: "Iterable[Text | str]") -> "Iterator[Text | str]":
    """Yield the lines of sections, with a blank line before each but the first, skipping empty ones."""
    for number, lines in enumerate(filter(None, map(list, sections))):
        yield from ["", *lines] if number else lines


def print_lines(lines: "Iterable[Text | str]", stream: TextIO) -> None:
    """Print lines that are already laid out."""
    from rich.console import Console

    console = Console(file=stream, width=report_width(), highlight=False, emoji=False, markup=False)
    for line in lines:
        console.print(line, overflow="ignore", no_wrap=True, crop=False)


def bar(share: float, cells_of_80: int) -> str:
    """Return a bar of up to `cells_of_80` cells (scaled to the report's width), to an eighth of a cell."""
    cells = max(min(cells_of_80, _NARROWEST_BAR), min(cells_of_80 + report_width() - _USUAL, _WIDEST_BAR))
    eighths = round(max(0.0, min(share, 1.0)) * cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def cut(name: str, width: int) -> str:
    """Shorten a name or path to `width` columns: "base_model.mo…ers.11.mlp". The end, which says most, loses least."""
    if len(name) <= width:
        return name
    start = (width - 1) // 3
    return f"{name[:start]}…{name[len(name) - (width - 1 - start) :]}"


def wrapped(sentence: str, *, first: str = "  ", rest: str | None = None, width: int = 0) -> list[str]:
    """Wrap a sentence to the report's width, with `first` and then `rest` (spaces by default) before its lines.

    Words and flags are not broken; a word wider than a line is broken after commas if it is a list, or shortened if it
    is a path.
    """
    from textwrap import wrap

    width = width or report_width()
    rest = " " * len(first) if rest is None else rest
    room = width - max(len(first), len(rest))
    parts = (word.replace(",", ", ") if len(word) > room else word for word in sentence.split(" "))
    words = " ".join(cut(word, room) for part in parts for word in part.split(" "))
    return wrap(
        words, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def said(sentence: str, style: str = "", *, first: str = "  ", rest: str | None = None) -> "Iterator[Text]":
    """Yield a wrapped sentence as text of one style."""
    return texts(wrapped(sentence, first=first, rest=rest), style)


def texts(lines: Iterable[str], style: str = "") -> "Iterator[Text]":
    """Yield lines as text of one style."""
    from rich.text import Text

    return (Text(line, style) for line in lines)


def packed(entries: Iterable[str], *, first: str = "  ", gap: str = "   ") -> list[str]:
    """Put as many entries on a line as fit, without breaking any."""
    held = (entry.replace(" ", "\xa0") for entry in entries if entry)
    # Lines may end at one space of a gap; the others are non-breaking.
    lines = wrapped(("\xa0" * (len(gap) - 1) + " ").join(held), first=first)
    return [line.replace("\xa0", " ").rstrip() for line in lines]


def beside(words: str, width: int, figures: str, *, first: str = "  ", rest: str | None = None) -> list[str]:
    """Return a table row: wrapped words in a column of `width` cells, and figures after the first line."""
    rest = " " * len(first) if rest is None else rest
    lines = wrapped(words, first=first, rest=rest, width=len(first) + width) or [first]
    lines[0] = f"{lines[0]:<{len(first) + width}}{figures}"
    return [line.rstrip() for line in lines]


def table_unit(largest_bytes: int) -> str:
    """Return the unit of a whole table: GiB, or MiB if the largest entry is small."""
    return "GiB" if largest_bytes >= GIB // 4 else "MiB"


def column(size_bytes: int, unit: str) -> str:
    """Format a size for an aligned column; sizes that would round to 0 use a smaller unit."""
    words = format_bytes(size_bytes, unit)
    return f"{format_bytes(size_bytes) if words.startswith('0.00') else words:>11}"


def ledger_row(
    word: str, amount: str, share: float, *, width: int, cells: int, style: str = "", wide: int = 6
) -> "Text":
    """Return a row of a ledger: a word, its amount, its share (in `wide` columns) and a bar of the whole."""
    from rich.text import Text

    row = Text(f"  {word:<{width}}{amount}{percent(share):>{wide}}  ")
    row.append(bar(share, cells), style).rstrip()
    return row


def table(
    rows: Sequence[Sequence[str]],
    *,
    align: str,
    names: Sequence[int] = (),
    spare: Sequence[int] = (),
    first: str = "  ",
    gap: str = "  ",
) -> list[str]:
    """Format rows in columns after `first`, with `gap` between them; the first row may be a heading.

    `align` has a "<" or ">" per column. If the table is too wide, `spare` columns are dropped in order, then `names`
    columns are shortened, the widest first.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    shown = [number for number in range(len(align)) if widths[number]]

    def excess() -> int:
        return len(first) + sum(widths[number] + len(gap) for number in shown) - len(gap) - report_width()

    # Drop columns until shortening the rest is enough.
    for number in spare:
        if excess() > sum(max(0, widths[name] - _NARROWEST_NAME) for name in names if name in shown):
            shown.remove(number)
    # Shorten the widest name until everything fits.
    cuttable = [number for number in names if number in shown]
    while excess() > 0 and any(widths[number] > _NARROWEST_NAME for number in cuttable):
        widths[max(cuttable, key=widths.__getitem__)] -= 1
    lines = (
        gap.join(f"{cut(row[number], widths[number]):{align[number]}{widths[number]}}" for number in shown)
        for row in rows
    )
    return [f"{first}{line}".rstrip() for line in lines]


def spread(left: "Text", right: "Text") -> "Iterator[Text]":
    """Put text at both ends of a line, or on two lines if it does not fit."""
    from rich.text import Text

    room = report_width() - 2 - left.cell_len - right.cell_len
    if room >= 2:
        yield left + Text(" " * room) + right
        return
    yield from (Text(line, style=left.style) for line in wrapped(left.plain.strip()))
    yield Text(" " * (report_width() - 2 - right.cell_len)) + right


def heading(text: str) -> "Text":
    """Return a section heading."""
    from rich.text import Text

    return Text(f"  {text}", style="bold")


def picked(value: object, names: str) -> dict[str, Any]:
    """Return the attributes of these names as JSON values; "key:path" is the attribute `path`, dotted or not, as `key`."""
    parts = (name.partition(":") for name in names.split())
    return {key: attrgetter(path or key)(value) for key, _, path in parts}

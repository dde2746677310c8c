"""Pieces of a report in the terminal's columns: bars, cut names, wrapped sentences, tables. They know no recording.

A report is as wide as the terminal, and 80 columns where there is none; COLUMNS overrides both. Sentences and hints are
wrapped (`wrapped`, `beside`); only names and paths are cut, in the middle (`cut`), so that their ends stay.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from tonnage.units import GIB, format_bytes

if TYPE_CHECKING:
    # Loaded where it is used: it takes longer than a plan.
    from rich.text import Text

_USUAL = 80
# Nothing is laid out for less; a narrower terminal breaks lines itself.
_NARROWEST = 60
_NARROWEST_NAME = 10
_NARROWEST_BAR, _WIDEST_BAR = 8, 60
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def report_width() -> int:
    """How wide a report is."""
    return max(_NARROWEST, shutil.get_terminal_size((_USUAL, 24)).columns)


def print_sections(sections: "Iterable[Iterable[Text | str]]", stream: TextIO) -> None:
    """One below the other, an empty line around each; one without lines is left out."""
    print_lines([""], stream)
    for section in sections:
        lines = list(section)
        print_lines([*lines, ""] if lines else [], stream)


def print_lines(lines: "Iterable[Text | str]", stream: TextIO) -> None:
    """As they are: they are laid out already."""
    from rich.console import Console

    console = Console(file=stream, width=report_width(), highlight=False, emoji=False, markup=False)
    for line in lines:
        console.print(line, overflow="ignore", no_wrap=True, crop=False)


def bar(share: float, cells_of_80: int) -> str:
    """A bar of up to so many cells (more or fewer where the report is not 80 wide), to an eighth of a cell."""
    cells = max(min(cells_of_80, _NARROWEST_BAR), min(cells_of_80 + report_width() - _USUAL, _WIDEST_BAR))
    eighths = round(max(0.0, min(share, 1.0)) * cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def cut(name: str, width: int) -> str:
    """A name or a path in at most `width` columns: "base_model.mo…ers.11.mlp". The end, which tells most, loses least."""
    if len(name) <= width:
        return name
    start = (width - 1) // 3
    return f"{name[:start]}…{name[len(name) - (width - 1 - start) :]}"


def wrapped(sentence: str, *, first: str = "  ", rest: str | None = None, width: int = 0) -> list[str]:
    """A sentence in lines as wide as the report, behind `first` and then `rest` (spaces, where it is not given).

    No word is broken, least of all a flag at its hyphens; one wider than a line is a list, and broken behind its commas, or
    a path, and cut.
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


def packed(entries: Iterable[str], *, first: str = "  ", gap: str = "   ") -> list[str]:
    """Entries beside each other, as many to a line as there is room for; none is broken."""
    held = (entry.replace(" ", "\xa0") for entry in entries if entry)
    # One space of a gap is where a line may end; the others hang on the entry before it.
    lines = wrapped(("\xa0" * (len(gap) - 1) + " ").join(held), first=first)
    return [line.replace("\xa0", " ").rstrip() for line in lines]


def beside(words: str, width: int, figures: str, *, first: str = "  ", rest: str | None = None) -> list[str]:
    """A row of a table: words in a column of so many cells, in as many lines as they need, and figures behind the first."""
    rest = " " * len(first) if rest is None else rest
    lines = wrapped(words, first=first, rest=rest, width=len(first) + width) or [first]
    lines[0] = f"{lines[0]:<{len(first) + width}}{figures}"
    return [line.rstrip() for line in lines]


def table_unit(largest_bytes: int) -> str:
    """The unit of a whole table: GiB, or MiB where the largest entry is small."""
    return "GiB" if largest_bytes >= GIB // 4 else "MiB"


def column(size_bytes: int, unit: str) -> str:
    """A size for an aligned column; what would round to nothing has a unit of its own."""
    words = format_bytes(size_bytes, unit)
    return f"{format_bytes(size_bytes) if words.startswith('0.00') else words:>11}"


def table(
    rows: Sequence[Sequence[str]],
    *,
    align: str,
    names: Sequence[int] = (),
    spare: Sequence[int] = (),
    first: str = "  ",
    gap: str = "  ",
) -> list[str]:
    """Rows of cells in columns behind `first`, with `gap` between them; the first row may be a heading.

    `align` has a "<" or a ">" for each column. Where they are too wide, columns of `spare` are left out, the first of them
    first, and then those of `names` are cut, the widest first.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    shown = [number for number in range(len(align)) if widths[number]]

    def excess() -> int:
        return len(first) + sum(widths[number] + len(gap) for number in shown) - len(gap) - report_width()

    # Leave columns out until what can be cut is enough.
    for number in spare:
        if excess() > sum(max(0, widths[name] - _NARROWEST_NAME) for name in names if name in shown):
            shown.remove(number)
    # Cut the widest name until all is narrow enough.
    cuttable = [number for number in names if number in shown]
    while excess() > 0 and any(widths[number] > _NARROWEST_NAME for number in cuttable):
        widths[max(cuttable, key=widths.__getitem__)] -= 1
    lines = (
        gap.join(f"{cut(row[number], widths[number]):{align[number]}{widths[number]}}" for number in shown)
        for row in rows
    )
    return [f"{first}{line}".rstrip() for line in lines]


def spread(left: "Text", right: "Text") -> "Iterator[Text]":
    """Something at either end of a line; of two lines where one is too short."""
    from rich.text import Text

    room = report_width() - 2 - left.cell_len - right.cell_len
    if room >= 2:
        yield left + Text(" " * room) + right
        return
    yield from (Text(line, style=left.style) for line in wrapped(left.plain.strip()))
    yield Text(" " * (report_width() - 2 - right.cell_len)) + right


def heading(text: str) -> "Text":
    """The name of a section."""
    from rich.text import Text

    return Text(f"  {text}", style="bold")

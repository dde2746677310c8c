"""Pieces of a report in 80 columns: bars, shares, shortened words. They know no recording."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from tonnage.units import GIB, format_bytes

if TYPE_CHECKING:
    # Loaded where it is used: it takes longer than a plan.
    from rich.text import Text

WIDTH = 80
_NARROWEST_NAME = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_sections(sections: "Iterable[Iterable[Text]]", stream: TextIO) -> None:
    """One below the other, an empty line around each; one without lines is left out."""
    from rich.console import Console

    console = Console(file=stream, width=WIDTH, highlight=False, emoji=False)
    console.print()
    for section in sections:
        lines = list(section)
        for line in lines:
            console.print(line, overflow="ignore", no_wrap=True, crop=False)
        if lines:
            console.print()


def bar(share: float, cells: int) -> str:
    """A bar of up to `cells` cells, to an eighth of a cell."""
    eighths = round(max(0.0, min(share, 1.0)) * cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def clip(text: str, width: int) -> str:
    """The text in at most `width` columns; what is cut is cut at the end."""
    return text if len(text) <= width else text[: width - 1] + "…"


def clip_start(text: str, width: int) -> str:
    """The text in at most `width` columns; what is cut is cut at the start, where a path says least."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def table_unit(largest_bytes: int) -> str:
    """The unit of a whole table: GiB, or MiB where the largest entry is small."""
    return "GiB" if largest_bytes >= GIB // 4 else "MiB"


def column(size_bytes: int, unit: str) -> str:
    """A size for an aligned column; what would round to nothing has a unit of its own."""
    words = format_bytes(size_bytes, unit)
    return f"{format_bytes(size_bytes) if words.startswith('0.00') else words:>11}"


def aligned(rows: Sequence[Sequence[str]], *, right: int) -> list[str]:
    """Rows of cells in columns: sizes (the first `right`), flush right; then what it is; then names.

    What does not fit is clipped: of the names the first ones first.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    while sum(widths) + len(widths) + 1 > WIDTH:
        names = range(right + 1, len(widths))
        widths[next((name for name in names if widths[name] > _NARROWEST_NAME), right)] -= 1
    return [" " + " ".join(_cells(row, widths, right)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], right: int) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        # Modules and lines say most at their end, shapes and operators at their start.
        clipped = clip_start(cell, width) if number > right + 1 else clip(cell, width)
        gap = " " if number == right else ""
        yield clipped.rjust(width) if number < right else gap + clipped.ljust(width)


def spread(left: "Text", right: "Text") -> "Text":
    """One line with something at either end."""
    from rich.text import Text

    gap = max(2, WIDTH - 2 - left.cell_len - right.cell_len)
    return left + Text(" " * gap) + right


def heading(text: str) -> "Text":
    """The name of a section."""
    from rich.text import Text

    return Text(f"  {text}", style="bold")

"""Pieces of a report in 80 columns: bars, shares, shortened words. They know no recording."""

from rich.text import Text

from tonnage.units import GIB, format_bytes

WIDTH = 80
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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


def spread(left: Text, right: Text) -> Text:
    """One line with something at either end."""
    gap = max(2, WIDTH - 2 - left.cell_len - right.cell_len)
    return left + Text(" " * gap) + right


def heading(text: str) -> Text:
    """The name of a section."""
    return Text(f"  {text}", style="bold")

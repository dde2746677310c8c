"""Pieces of HTML. Everything from a recording goes through `text`, since recordings are untrusted."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tonnage.units import format_bytes

LONGEST_TEXT = 240


def clean(words: str, longest: int = LONGEST_TEXT) -> str:
    """Truncate text and replace invisible and direction-changing characters."""
    cut = words if len(words) <= longest else words[: longest - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in cut)


def text(words: str, longest: int = LONGEST_TEXT) -> str:
    """Escape text as HTML."""
    return escape(clean(words, longest))


def name(words: str) -> str:
    """Return a dotted or underscored name that may break between its parts."""
    return text(words).replace(".", ".<wbr>").replace("_", "_<wbr>")


def size(size_bytes: int, unit: str | None = None) -> str:
    """Return a readable size, with the exact bytes on hover and for scripts."""
    words = format_bytes(size_bytes, unit)
    if unit and words.startswith("0.00"):
        words = format_bytes(size_bytes)
    return f'<span class="size" data-bytes="{size_bytes}" title="{size_bytes:,} bytes">{words}</span>'


def share(part: int, whole: int) -> str:
    """Format a share like "62.9 %"; empty if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def swatch(category: str) -> str:
    """Return the colour swatch of a category."""
    return f'<span class="swatch c-{category}"></span>'


def column(category: str, label: str) -> str:
    """Return a column heading whose colour swatch stays with the first word."""
    first, _, rest = label.partition(" ")
    return f'<span class="whole">{swatch(category)}{text(first)}</span> {text(rest)}'


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, numbers: Sequence[int] = (), kind: str = ""
) -> str:
    """Return a table of cells that are already HTML; the columns in `numbers` are right-aligned, `kind` is a class."""
    kinds = [' class="n"' if column in numbers else "" for column in range(len(columns))]
    head = "".join(f"<th{kind}>{column}</th>" for kind, column in zip(kinds, columns, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    heading = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    styled = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table id="{name}"{styled}>{heading}<tbody>\n{body}\n</tbody></table></div>'


def head(title: str, verdict: str, kind: str, facts: str, *parts: str) -> str:
    """Return the top of a page: title, verdict (`kind`: ok, oom or error) and facts, all already HTML."""
    pill = f'<span id="verdict" class="verdict {kind}">{verdict}</span>' if verdict else ""
    return f'<header><div class="head"><h1>{title}</h1>{pill}</div><p id="card">{facts}</p>{"".join(parts)}</header>'


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return (name, figure, note) tiles side by side."""
    each = (
        f'<div><dt>{name}</dt><dd class="figure">{figure}</dd><dd class="note">{note}</dd></div>'
        for name, figure, note in entries
    )
    return f'<dl class="tiles">{"".join(each)}</dl>'


def folded(rows: Sequence[Sequence[str]], shown: int, columns: Sequence[str], **options: Any) -> str:
    """Return a table of the first rows, with the others collapsed."""
    name = options.pop("name")
    first = table(columns, rows[:shown], name=name, **options)
    if len(rows) <= shown:
        return first
    rest = table(columns, rows[shown:], name=f"{name}-more", **options)
    return f"{first}<details><summary>{len(rows) - shown:,} more</summary>{rest}</details>"


def section(title: str, *parts: str, name: str, note: str = "") -> str:
    """Return a section with a heading and a note on how to read it."""
    said = f'<p class="note">{note}</p>' if note else ""
    return f'<section id="{name}"><h2>{title}</h2>{said}\n' + "\n".join(parts) + "\n</section>"

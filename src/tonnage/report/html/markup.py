"""Pieces of HTML, and what every page shares. Everything from a recording goes through `text`, since it is untrusted."""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tonnage.report.lines import table_unit
from tonnage.units import format_bytes

LONGEST_TEXT = 240


def clean(words: str, longest: int = LONGEST_TEXT) -> str:
    """Truncate text and replace invisible and direction-changing characters."""
    cut = words if len(words) <= longest else words[: longest - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in cut)


def sentence(words: str) -> str:
    """Return words as a sentence: with a capital, and a full stop."""
    return f"{words[:1].upper()}{words[1:]}." if words else ""


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


def bar(parts: Sequence[tuple[str, int]], whole: int) -> str:
    """Return a stacked bar of a whole's (colour, size) parts."""
    boxes, at = [], 0.0
    for kind, part in parts:
        width = 1000 * part / whole if whole else 0
        boxes.append(f'<rect class="c-{kind}" x="{at:.2f}" y="0" width="{width:.2f}" height="1"/>')
        at += width
    return f'<svg class="bar" viewBox="0 0 1000 1" preserveAspectRatio="none" aria-hidden="true">{"".join(boxes)}</svg>'


def ledger(parts: Sequence[tuple[str, str, int]], whole: int, *, bars: bool = True) -> list[tuple[str, ...]]:
    """Return a row for each (colour, name, bytes) part: its swatch and name, its size, its share and perhaps a bar."""
    unit = table_unit(whole)
    return [
        (swatch(kind) + text(name), size(part, unit), share(part, whole), *([bar([(kind, part)], whole)] * bars))
        for kind, name, part in parts
    ]


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
    each = (tile(name, figure, note, figure_kind=' class="figure"') for name, figure, note in entries)
    return f'<dl class="tiles">{"".join(each)}</dl>'


def tile(title: str, figure: str, note: str, *, name: str = "", figure_kind: str = "") -> str:
    """Return one tile: a title, a figure and a note on it."""
    known = f' id="{name}"' if name else ""
    return f'<div{known}><dt>{title}</dt><dd{figure_kind}>{figure}</dd><dd class="note">{note}</dd></div>'


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


_DATA = Path(__file__).parent / "data"


@cache
def read_parts(*names: str) -> str:
    """Read a template, styles or scripts."""
    return "".join((_DATA / name).read_text(encoding="utf-8") for name in names)


@cache
def colours() -> dict[str, str]:
    """Return the category colours by key: those of the light theme, which also suit the dark one."""
    return dict(re.findall(r"--c-(\w+): (#\w+)", read_parts("page.css").partition("@media")[0]))


def embedded(figures: dict[str, object]) -> str:
    """Return JSON in which no markup can begin or end."""
    plain = json.dumps(figures, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed_json(columns: dict[str, object]) -> str:
    """Return compressed, base64-encoded JSON."""
    plain = json.dumps(columns, separators=(",", ":"))
    return b64encode(gzip.compress(plain.encode(), compresslevel=6, mtime=0)).decode()


def simple_page(
    title: str,
    *parts: str,
    styles: Iterable[str] = (),
    scripts: Iterable[str] = (),
    data: dict[str, object] | None = None,
) -> str:
    """Return a page of sections in the common style, with a script if it has a chart."""
    style, script = read_parts("page.css", *styles), read_parts(*scripts)
    figures = f'<script type="application/json" id="data">{embedded(data)}</script>' if data is not None else ""
    return Template(read_parts("simple.html")).substitute(
        policy=policy([style], [script]),
        title=title,
        style=style,
        body="\n".join(filter(None, parts)),
        scripts=f"{figures}\n<script>{script}</script>" if script else "",
    )


def policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Return a content security policy that allows exactly these styles and scripts, and no connections."""

    def hashes(sources: Iterable[str]) -> str:
        return " ".join(f"'sha256-{b64encode(sha256(one.encode()).digest()).decode()}'" for one in sources)

    allowed = f"style-src {hashes(styles)}; script-src {hashes(scripts)}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"

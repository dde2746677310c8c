"""A recording as the output of a notebook's cell: the terminal's report as text, and as a small piece of HTML.

The HTML has no script and no colours of its own for text, so that it is at home in a light and in a dark notebook; all
that comes from the recording is escaped. Nothing is computed here but layout.
"""

import io
from collections.abc import Iterable, Iterator
from html import escape

from tonnage.explain import Advice, advise
from tonnage.ledger import Category
from tonnage.recording import Group, Recording, telling_lines
from tonnage.report.terminal import print_report
from tonnage.units import format_bytes, percent

_LARGEST = 5
_FIXES = 4
_COLUMNS = 240
_WIDTH, _HEIGHT = 640, 90
_COLOURS = {
    Category.PARAMETERS: "#4477aa",
    Category.GRADIENTS: "#66ccee",
    Category.OPTIMIZER_STATES: "#228833",
    Category.ACTIVATIONS: "#ccbb44",
    Category.WORKSPACE: "#ee6677",
    Category.KV_CACHE: "#aa3377",
}
_OTHER_COLOUR = "#999999"
_VERDICTS = {"ok": "fits", "oom": "does not fit", "error": "the cell failed"}


def cell_text(recording: Recording) -> str:
    """The report of the terminal."""
    stream = io.StringIO()
    print_report([recording], recording, advise(recording), stream=stream, verbose=False)
    return stream.getvalue().rstrip()


def cell_html(recording: Recording) -> str:
    """Headline, timeline, ledger, the largest tensors and what would save memory."""
    parts = [_headline(recording)]
    if recording.allocations:
        parts += [_timeline(recording), _ledger(recording), _largest(recording), _fixes(advise(recording))]
    return f'<div class="tonnage" style="max-width:{_WIDTH}px;line-height:1.4">{"".join(parts)}</div>'


def _headline(recording: Recording) -> str:
    header = recording.header
    if not recording.allocations:
        return f"<p><b>{escape(header.gpu_name)}</b>: nothing was allocated on the GPU</p>"
    peaks = (
        f"allocated {format_bytes(recording.peak_allocated_bytes)}, reserved {format_bytes(recording.peak_reserved_bytes)}"
        f", process {format_bytes(recording.peak_process_bytes)} of {format_bytes(header.capacity_bytes)}"
    )
    at = recording.oom or recording.peak_allocation
    what = "out of memory" if recording.oom else "peak"
    where = f"<br>{what} in {escape(at.phase or 'setup')} at <code>{escape(at.line)}</code>" if at and at.line else ""
    verdict = _VERDICTS[header.outcome]
    return f"<p><b>{escape(header.gpu_name)}</b> ({escape(header.source)}): <b>{verdict}</b><br>{peaks}{where}</p>"


def _timeline(recording: Recording) -> str:
    """Allocated bytes over the run's events as an area, reserved ones as a line above it; every peak is kept."""
    allocated = _peaks(recording.timeline.allocated_bytes)
    reserved = _peaks(recording.timeline.reserved_bytes)
    full = max(*reserved, *allocated, 1)
    area = f"0,{_HEIGHT} {_points(allocated, full)} {_WIDTH},{_HEIGHT}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="memory over the run">'
        f'<polygon points="{area}" fill="#4477aa" fill-opacity="0.6"/>'
        f'<polyline points="{_points(reserved, full)}" fill="none" stroke="currentColor" stroke-opacity="0.6"/></svg>'
    )


def _peaks(values: list[int]) -> list[int]:
    """At most so many columns, each the highest of its stretch."""
    width = max(1, -(-len(values) // _COLUMNS))
    return [max(values[start : start + width]) for start in range(0, len(values), width)]


def _points(values: list[int], full: int) -> str:
    last = max(1, len(values) - 1)
    return " ".join(f"{_WIDTH * i / last:.1f},{_HEIGHT * (1 - value / full):.1f}" for i, value in enumerate(values))


def _ledger(recording: Recording) -> str:
    found = recording.ledger()
    rows = []
    for category, size_bytes in found.ranked():
        share = 100 * size_bytes / found.total_bytes
        colour = _COLOURS.get(category, _OTHER_COLOUR)
        bar = f'<div style="background:{colour};height:0.8em;width:{share:.1f}%;min-width:1px"></div>'
        rows.append((category.label, format_bytes(size_bytes), percent(share / 100), bar))
    return _table(
        (escape(label), size, share, f'<div style="width:220px">{bar}</div>') for label, size, share, bar in rows
    )


def _largest(recording: Recording) -> str:
    groups = recording.largest(_LARGEST)
    lines = telling_lines((group.line, group.stack) for group in groups)
    return "<p><b>largest at the peak</b></p>" + _table(map(_group, groups, lines))


def _group(group: Group, line: str) -> tuple[str, ...]:
    maker = group.operator.removeprefix("aten::")
    words = (group.what, maker, group.module or group.category.label, line)
    return (format_bytes(group.total_bytes), *map(escape, words))


def _fixes(advice: Advice) -> str:
    if not advice.fixes:
        return ""
    rows = [
        (
            escape(fix.change),
            f"saves {format_bytes(fix.saves_bytes)}",
            f"costs {escape(fix.costs)}<br><code>{escape(fix.how)}</code>",
        )
        for fix in advice.fixes[:_FIXES]
    ]
    return "<p><b>to save memory</b></p>" + _table(rows)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Cells are HTML already."""
    return f'<table style="font-size:inherit">{"".join(_rows(rows))}</table>'


def _rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Only the last cell of a row may wrap."""
    for *cells, last in rows:
        held = "".join(f'<td style="text-align:left;white-space:nowrap">{cell}</td>' for cell in cells)
        yield f'<tr>{held}<td style="text-align:left;overflow-wrap:anywhere">{last}</td></tr>'

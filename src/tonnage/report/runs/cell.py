"""A recording as the output of a notebook cell: the terminal's report as text, and a small piece of HTML.

Chart and category colours are those of the HTML page. There is no script and no text colour, so it suits light and dark
notebooks; everything from the recording is escaped. It only formats.
"""

import io
from collections.abc import Iterable
from html import escape
from itertools import accumulate

from tonnage.explain import Advice, Outlook, advice_for, advise
from tonnage.recording import Recording, telling_lines
from tonnage.recording.beyond import until_failure
from tonnage.report.html import markup
from tonnage.report.html.markup import colours
from tonnage.report.html.series import series_of
from tonnage.report.runs.terminal import print_report
from tonnage.report.runs.total import CLIMBS
from tonnage.units import format_bytes, percent

_LARGEST = 5
_FIXES = 4
_COLUMNS = 240
_WIDTH, _HEIGHT = 640, 120
_VERDICTS = {"ok": "fits", "oom": "does not fit", "error": "the cell failed", "depends": "depends on unknown values"}


def cell_text(recording: Recording) -> str:
    """Return the terminal's report."""
    stream = io.StringIO()
    print_report([recording], recording, _advice(recording), stream=stream, verbose=False)
    return stream.getvalue().rstrip()


def cell_html(recording: Recording) -> str:
    """Return headline, timeline, ledger, the largest tensors and memory-saving changes as HTML."""
    advice = _advice(recording) if recording.allocations else Advice()
    parts = [_headline(recording, advice.outlook)]
    if recording.allocations:
        parts.append(_timeline(recording))
        # The ledger at the peak.
        ledger = recording.ledger()
        rows: list[tuple[str, ...]] = []
        for category, size in ledger.ranked():
            share = size / ledger.total_bytes
            look = f"background:{colours()[str(category)]};height:0.8em;width:{100 * share:.1f}%;min-width:1px"
            bar = f'<div style="width:min(220px,24vw)"><div style="{look}"></div></div>'
            rows.append((escape(category.label), format_bytes(size), percent(share), bar))
        parts.append(_table(rows))
        # The largest tensors.
        groups, rows = recording.largest(_LARGEST), []
        for group, line in zip(groups, telling_lines((group.line, group.stack) for group in groups), strict=True):
            words = (group.operator.removeprefix("aten::"), group.module or group.category.label, line)
            rows.append((format_bytes(group.total_bytes), escape(group.what), *map(markup.name, words)))
        parts.append("<p><b>largest at the peak</b></p>" + _table(rows))
        # What saves memory.
        changes = []
        for fix in advice.fixes[:_FIXES]:
            costs = f"costs {escape(fix.costs)}<br><code>{escape(fix.how)}</code>"
            changes.append((escape(fix.change), f"saves {format_bytes(fix.saves_bytes)}", costs))
        parts += ["<p><b>to save memory</b></p>" + _table(changes)] if changes else []
    return f'<div class="tonnage" style="max-width:{_WIDTH}px;line-height:1.4">{"".join(parts)}</div>'


def _advice(recording: Recording) -> Advice:
    """Return the advice of a failed cell, without the cause: the traceback is shown above it."""
    return advise(recording) if recording.oom else advice_for(recording)


def _headline(recording: Recording, ahead: Outlook) -> str:
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
    verdict = CLIMBS if ahead.climb and header.outcome == "ok" else _VERDICTS[header.outcome]
    dependence = recording.dependence
    because = [dependence.sentence, dependence.advice] if dependence else []
    said = "".join(f"<br>{escape(line)}" for line in [*because, *ahead.lines])
    return (
        f"<p><b>{escape(header.gpu_name)}</b> ({escape(header.source)}): <b>{verdict}</b><br>{peaks}{where}{said}</p>"
    )


def _timeline(recording: Recording) -> str:
    """Draw the timeline as the page does: allocated bytes stacked by category, reserved bytes as a line, steps below."""
    series = series_of(until_failure(recording), _COLUMNS)
    reserved = list(accumulate(series["reserved"]))
    stacked = [(c["key"], list(accumulate(c["levels"]))) for c in series["categories"]]
    allocated = [sum(levels) for levels in zip(*(levels for _, levels in stacked), strict=True)]
    # The highest point of each column, as (x, point).
    length: int = series["events"]
    best: dict[int, int] = {}
    for at, event in enumerate(accumulate(series["points"])):
        column = event * _COLUMNS // max(length, 1)
        if column not in best or allocated[at] > allocated[best[column]]:
            best[column] = at
    places = [(_WIDTH * column / _COLUMNS, at) for column, at in best.items()]
    full = max(*reserved, *allocated, 1)
    floor, areas = [0] * len(places), []
    for key, levels in stacked:
        roof = [below + levels[at] for below, (_, at) in zip(floor, places, strict=True)]
        edge = [*_steps(places, roof, full), *reversed(_steps(places, floor, full))]
        areas.append(f'<polygon points="{" ".join(edge)}" fill="{colours()[key]}"/>')
        floor = roof
    line = " ".join(_steps(places, [reserved[at] for _, at in places], full))
    # A box for each step, with its name if it fits.
    strip = ""
    for number, (start, end, name) in enumerate(series["steps"][:_COLUMNS]):
        left, width = _WIDTH * start / length, _WIDTH * (end - start) / length
        if name == "0":
            continue
        strip += f'<rect x="{left:.1f}" y="{_HEIGHT + 3}" width="{width:.1f}" height="14" fill="currentColor" '
        strip += f'fill-opacity="{0.14 if number % 2 else 0.22}"/>'
        if width > 7 * len(f"step {name}"):
            strip += f'<text x="{left + width / 2:.1f}" y="{_HEIGHT + 14}" text-anchor="middle" font-size="11" '
            strip += f'fill="currentColor">step {escape(name)}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" width="100%" role="img" aria-label="memory over the run, by category">'
        f'{"".join(areas)}<polyline points="{line}" fill="none" stroke="currentColor" stroke-opacity="0.7"/>{strip}</svg>'
    )


def _steps(places: list[tuple[float, int]], levels: list[int], full: int) -> list[str]:
    """Return a staircase path: each level stays until the next event."""
    ends = [*(x for x, _ in places[1:]), float(_WIDTH)]
    found = []
    for (x, _), end, level in zip(places, ends, levels, strict=True):
        y = _HEIGHT * (1 - level / full)
        found += [f"{x:.1f},{y:.1f}", f"{end:.1f},{y:.1f}"]
    return found


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Lay out cells that are already HTML: sizes stay on one line, names may break at a `wbr`."""

    def cell_html(cell: str) -> str:
        style = "min-width:7em" if "<wbr>" in cell else "white-space:nowrap"
        if "<br>" in cell:
            style = "min-width:12em;overflow-wrap:anywhere"
        return f'<td style="text-align:left;vertical-align:top;{style}">{cell}</td>'

    body = "".join(f"<tr>{''.join(map(cell_html, row))}</tr>" for row in rows)
    return f'<div style="overflow-x:auto"><table style="font-size:inherit">{body}</table></div>'

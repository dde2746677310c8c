"""What grew from one run to another as one HTML page that works offline: both runs in one chart, and every table."""

from collections.abc import Sequence
from string import Template

from tonnage.explain.diff import Growth
from tonnage.report.html import markup
from tonnage.report.html.markup import read_parts, simple_page, size, text
from tonnage.report.html.page import SOURCES
from tonnage.report.html.series import line_of
from tonnage.report.runs.diff import ComparedRuns, growth_percent, labelled, signed
from tonnage.report.runs.total import verdict_words

_SAMPLES = 3_000
_ROWS, _MOST_ROWS = 15, 400
_NOTE = (
    "Both runs over each other, step by step: within a step each line is as wide as the other, whatever happens there. "
    "Point at a line to read it; choose a name to bring its line to the front."
)


def render_diff_page(compared: ComparedRuns) -> str:
    """Return the page."""
    names, runs, difference = compared.names, compared.runs, compared.difference
    lines = [{"name": f"{letter}  {name}", "word": "", "role": None} for letter, name in zip("AB", names, strict=True)]
    # The memory available to PyTorch, if both ran on the same card.
    ceilings = {max(run.header.capacity_bytes - run.header.overhead_bytes, 0) for run in runs}
    return simple_page(
        text(f"{names[0]} → {names[1]}"),
        _header(compared),
        Template(read_parts("lines.html")).substitute(note=_NOTE),
        _table("Peaks of phases", difference.phases, "phases"),
        _table("At the peak, by category", labelled(difference.categories), "categories"),
        _table("By module", difference.modules, "modules"),
        _table("By line", difference.lines, "lines-of-code"),
        styles=("lines.css",),
        scripts=("common.js", "drawing.js", "lines.js"),
        data={
            "lines": [head | line_of(run, _SAMPLES) for head, run in zip(lines, runs, strict=True)],
            "ceiling": ceilings.pop() if len(ceilings) == 1 else 0,
        },
    )


def _header(compared: ComparedRuns) -> str:
    names, peaks, limit, failed = compared.names, compared.difference.peaks, compared.limit, compared.failed
    grew = peaks[0].grew_bytes
    verdict = f"{signed(grew)} ({growth_percent(peaks[0])})" if grew else "no change"
    # Growth is red, as in the terminal; with a limit the verdict is whether it holds.
    kind = ("oom" if failed else "ok") if limit else "oom" if grew > 0 else "ok"
    tiles = [
        (text(peak.name), size(peak.after_bytes), f"{signed(peak.grew_bytes)} from {size(peak.before_bytes)}")
        for peak in peaks
    ]
    rows = []
    for letter, name, head in zip("AB", names, (run.header for run in compared.runs), strict=True):
        words = (name, head.gpu_name, SOURCES[head.source], verdict_words(head.outcome))
        rows.append((f"<strong>{letter}</strong>", *map(text, words)))
    table = markup.table(("", "", "", "", ""), rows, name="runs")
    title, said = f"{text(names[0])} → {text(names[1])}", ""
    if limit:
        over = f'<p class="failure">Grew by more than {text(limit.text)}.</p>'
        said = over if failed else f"<p>Within {text(limit.text)}.</p>"
    return markup.head(title, verdict, kind, "what grew from A to B, at the peak", markup.tiles(tiles), said, table)


def _table(title: str, growths: Sequence[Growth], name: str) -> str:
    """Return entries that changed, most first, with a bar to either side; "" if there is nothing to distinguish."""
    if [growth.name for growth in growths] in ([], [""]):
        return ""
    most, rows = max(1, *(abs(growth.grew_bytes) for growth in growths)), []
    for growth in growths[:_MOST_ROWS]:
        grew, width = growth.grew_bytes, 500 * abs(growth.grew_bytes) / most
        style = "grew" if grew > 0 else "shrank" if grew else "note"
        words = f'<span class="{style}" data-bytes="{grew}">{signed(grew)}</span>'
        less, start = (' class="less"', 500 - width) if grew < 0 else ("", 500)
        drawn = (
            '<svg class="growth" viewBox="0 0 1000 1" preserveAspectRatio="none" aria-hidden="true"><rect'
            f'{less} x="{start:.2f}" y="0" width="{width:.2f}" height="1"/><line x1="500" x2="500" y1="0" y2="1"/></svg>'
        )
        name_cell = markup.name(growth.name) or "elsewhere"
        rows.append((name_cell, size(growth.before_bytes), size(growth.after_bytes), words, drawn))
    body = markup.folded(rows, _ROWS, ("", "A", "B", "grew", ""), name=name, numbers=(1, 2, 3), kind="growths")
    left_out = len(growths) - len(rows)
    note = f"and {left_out:,} that changed less are left out" if left_out else ""
    return markup.section(title, body, name=f"{name}-section", note=note)

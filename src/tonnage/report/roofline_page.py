"""A roofline as one HTML page that works offline: the plot, what the classes mean, every row."""

from collections.abc import Iterator
from html import escape

from tonnage.report.html.shell import simple_page
from tonnage.report.roofline import fixes_of, intensity_words, seconds_words
from tonnage.report.roofline_plot import NARROW_HEIGHT, NARROW_WIDTH, plane_of, svg
from tonnage.roofline import MEANINGS, Analysis, RooflineRow
from tonnage.units import percent


def roofline_page(analysis: Analysis) -> str:
    """Return the page."""
    title = escape(f"{analysis.profile.source} · {analysis.ceilings.gpu}")
    body = [f"<h1>{title}</h1>", *_body(analysis), '<div id="tip" class="tip" role="status" hidden></div>']
    return simple_page(title, *body, styles=("roofline.css",), scripts=("tips.js",))


def _body(analysis: Analysis) -> Iterator[str]:
    ceilings = analysis.ceilings
    known = "measured on the card" if ceilings.measured else "as stated by its maker"
    yield (
        f"<p>Ceilings {known}: {ceilings.memory_bytes_per_s / 1e12:.2f} TB/s, {ceilings.precision} "
        f"{ceilings.rate(ceilings.precision) / 1e12:,.0f} TFLOP/s; they meet at "
        f"{ceilings.ridge(ceilings.precision):.0f} operations a byte.</p>"
    )
    yield from _timeline(analysis)
    plane = plane_of(analysis)
    if plane is not None:
        wide, narrow = svg(plane, describe), svg(plane, describe, width=NARROW_WIDTH, height=NARROW_HEIGHT)
        absent = len(analysis.rows) - len(plane.points)
        others = f" {absent} without counted arithmetic or bytes are in the table alone." if absent else ""
        caption = f"<figcaption>Areas are times; point at a mark for its figures.{others}</figcaption>"
        yield f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>{caption}</figure>'
    yield from _classes(analysis)
    yield '<h2>What to do</h2><div class="scroll"><table id="changes"><tbody>'
    for seconds, what, change in fixes_of(analysis)[:12]:
        yield f'<tr><td class="n">{seconds_words(seconds)}</td><td>{escape(what)}</td><td>{escape(change)}</td></tr>'
    yield "</tbody></table></div>"
    yield from _table(analysis)
    yield from (f"<p>{escape(note)}</p>" for note in analysis.profile.notes)


def describe(row: RooflineRow) -> str:
    """Return the hover text of a mark."""
    item, verdict = row.item, row.verdict
    parts = [f"{item.name} {item.detail}".strip(), f"{seconds_words(row.seconds)} in {item.calls:,} calls"]
    if item.work.intensity is not None:
        parts.append(f"{intensity_words(item.work.intensity)} FLOP/B")
    near = "" if verdict.share is None else f", {percent(verdict.share, 0)} of its ceiling"
    return "\n".join([*parts, f"{verdict.bound}{near}", row.advice])


def _timeline(analysis: Analysis) -> Iterator[str]:
    timeline = analysis.profile.timeline
    if timeline is not None and timeline.span_s:
        busy, host, queue = (part / timeline.span_s for part in (timeline.busy_s, timeline.host_s, timeline.queue_s))
        yield (
            f"<p>Of {seconds_words(timeline.span_s)} the card was busy {percent(busy)}; it waited for the host {percent(host)} "
            f"and in the queue {percent(queue)}.</p>"
        )


def _classes(analysis: Analysis) -> Iterator[str]:
    yield '<h2>Time by bound</h2><div class="scroll"><table id="bounds"><tbody>'
    for bound, seconds in analysis.seconds_by_bound().items():
        name = bound.removesuffix("-bound")
        share = analysis.part(seconds)
        yield (
            f'<tr><td><span class="key {name}"></span>{bound}</td><td class="n">{seconds_words(seconds)}</td>'
            f'<td class="n">{percent(share)}</td><td>{escape(MEANINGS[bound])}</td></tr>'
        )
    yield "</tbody></table></div>"


def _table(analysis: Analysis) -> Iterator[str]:
    columns = ("time", "expected", "calls", "bound", "of DRAM", "of the SMs", "FLOP/B", "what")
    yield f'<h2>All {len(analysis.rows)}</h2><div class="scroll"><table id="rows"><thead><tr>'
    yield "".join(f"<th>{column}</th>" for column in columns) + "</tr></thead><tbody>"
    for row in analysis.rows:
        yield _table_row(row)
    yield "</tbody></table></div>"


def _table_row(row: RooflineRow) -> str:
    item, verdict = row.item, row.verdict
    shares = (verdict.memory_share, verdict.compute_share)
    numbers = ["–" if share is None else percent(share, 0) for share in shares] + [intensity_words(item.work.intensity)]
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    what = escape(" ".join(filter(None, (item.group, item.name, item.detail))))
    kernels = escape("\n".join(item.kernels))
    expected = seconds_words(row.expected_s) if row.expected_s else ""
    return (
        f'<tr><td class="n">{seconds_words(row.seconds)}</td><td class="n">{expected}</td><td class="n">{item.calls:,}</td>'
        f'<td><span class="key {verdict.bound.removesuffix("-bound")}"></span>{verdict.bound}</td>{cells}'
        f'<td title="{kernels}">{what}</td></tr>'
    )

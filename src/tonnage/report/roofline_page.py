"""A roofline as one HTML page that works offline: the plot, what the classes mean, every row."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10, sqrt
from textwrap import wrap

from tonnage.report.html.markup import simple_page, table
from tonnage.report.lines import cut
from tonnage.report.roofline import fixes_of, intensity_words, seconds_words
from tonnage.roofline import Analysis, Bound
from tonnage.roofline.analysis import MEANINGS, RooflineRow
from tonnage.units import percent

WIDTH, HEIGHT = 960, 560
NARROW_WIDTH, NARROW_HEIGHT = 400, 420  # for a phone: the same font size on a smaller plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 20, 56
_SMALLEST, _LARGEST = 4.0, 18.0
# Maximum decades per axis: points beyond are drawn at its edge.
_DECADES = 9
_LETTER = 7.6  # pixel width of a letter, even bold
_NAMED = 10
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class Point:
    """A row in the plane, or on the plot in pixels, where its mark has a size."""

    x: float
    y: float
    row: RooflineRow
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class Roof:
    """A rate, and the intensity from which it applies."""

    name: str
    rate: float
    ridge: float


@dataclass(frozen=True, slots=True)
class Plane:
    """What is drawn, in its own units."""

    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    slope_name: str
    x_name: str
    y_name: str


@dataclass(frozen=True, slots=True)
class LogAxis:
    """Maps whole decades to pixels."""

    first: int
    last: int
    start: float
    end: float

    def __call__(self, value: float) -> float:
        decade = min(max(log10(value), self.first), self.last)
        return self.start + (decade - self.first) / (self.last - self.first) * (self.end - self.start)

    def ticks(self) -> range:
        """The decades of the axis."""
        return range(self.first, self.last + 1)


def plane_of(analysis: Analysis) -> Plane | None:
    """Return the rows that can be placed; None if there are none."""
    works = [(row, row.item.work.intensity, row.item.work.operations) for row in analysis.rows if row.seconds]
    counted = tuple(Point(intensity, done / row.seconds, row) for row, intensity, done in works if intensity and done)
    if counted:
        ceilings, roofs = analysis.ceilings, []
        used = {ceilings.has(point.row.item.work.precision) for point in counted} | {ceilings.precision}
        for name in sorted(used, key=ceilings.rate):
            rate = ceilings.rate(name)
            roofs.append(Roof(f"{name} {rate / 1e12:,.0f} TFLOP/s", rate, ceilings.ridge(name)))
        slope = f"memory {ceilings.memory_bytes_per_s / 1e12:.2f} TB/s"
        names = ("operations on each byte (FLOP/B)", "operations a second (FLOP/s)")
        return Plane(counted, tuple(roofs), slope, *names)
    judged = [(row, row.verdict.memory_share, row.verdict.compute_share) for row in analysis.rows]
    shares = tuple(Point(compute / memory, compute, row) for row, memory, compute in judged if memory and compute)
    names = ("time that the SMs' pipes explain, over time that DRAM explains", "share of the SMs' pipes")
    return Plane(shares, (Roof("the SMs' pipes", 1.0, 1.0),), "DRAM", *names) if shares else None


def svg(plane: Plane, describe: Callable[[RooflineRow], str], *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return the whole picture."""
    xs = [
        *(point.x for point in plane.points),
        *(x for roof in plane.roofs for x in (roof.ridge / 10, roof.ridge * 10)),
    ]
    ys = [*(point.y for point in plane.points), *(roof.rate for roof in plane.roofs)]
    right = ceil(log10(max(xs)))
    top = max(ceil(log10(max(ys) * 1.2)), floor(log10(min(ys))) + 1)
    left = max(floor(log10(min(xs))), right - _DECADES)
    bottom = max(floor(log10(min(ys))), top - _DECADES)
    x, y = LogAxis(left, right, _LEFT, width - _RIGHT), LogAxis(bottom, top, height - _BOTTOM, _TOP)
    # Areas are proportional to times; the smallest come last, on top.
    longest, marks = max(point.row.seconds for point in plane.points), []
    for point in sorted(plane.points, key=lambda point: -point.row.seconds):
        of_area = max(_SMALLEST, _LARGEST * sqrt(point.row.seconds / longest))
        marks.append(Point(x(point.x), y(point.y), point.row, of_area))
    labels = Labels(x.end, [(m.x - m.size, m.y - m.size, m.x + m.size, m.y + m.size) for m in marks])
    # One slope for memory; each roof starts at its ridge.
    parts = [*_grid(plane, x, y)]
    for x1, y1, x2, y2 in (_slope(plane, x, y), *((x(r.ridge), y(r.rate), x.end, y(r.rate)) for r in plane.roofs)):
        parts.append(f'<line class="roof" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    parts += (_mark(mark, describe(mark.row)) for mark in marks)
    parts += filter(None, [*_roof_names(plane, x, y, labels), *_names(marks, labels)])
    label, inside = escape(f"Roofline: {plane.y_name} against {plane.x_name}"), "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="group" aria-label="{label}">\n{inside}\n</svg>'


def _grid(plane: Plane, x: LogAxis, y: LogAxis) -> Iterator[str]:
    for decade in x.ticks():
        at = x(10.0**decade)
        yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{y.start}"/>'
        yield f'<text x="{at:.1f}" y="{y.start + 18}" text-anchor="middle">{_power(decade)}</text>'
    for decade in y.ticks():
        at = y(10.0**decade)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{x.end}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_power(decade)}</text>'
    middle, center = (y.start + y.end) / 2, (x.start + x.end) / 2
    # A name that is longer than the picture is wide takes two lines.
    room = 2 * min(center, x.end + _RIGHT - center)
    lines = wrap(plane.x_name, int(room / _LETTER))
    first = y.start + (44 if len(lines) == 1 else 37)
    for number, line in enumerate(lines):
        yield f'<text x="{center}" y="{first + 14 * number}" text-anchor="middle">{escape(line)}</text>'
    yield (f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(plane.y_name)}</text>')


def _power(decade: int) -> str:
    if -3 <= decade < 0:
        return f"{10.0**decade:g}"
    if 0 <= decade < 3 * len(_PREFIXES):
        prefix = _PREFIXES[decade // 3]
        return f"{10 ** (decade % 3)} {prefix}".strip()
    return f"1e{decade}"


@dataclass(slots=True)
class Labels:
    """Places labels so that none overlaps a mark, another label or the edge."""

    edge: float
    taken: list[tuple[float, float, float, float]]

    def place(self, spots: Iterable[tuple[float, float]], words: str, *, always: bool = False) -> str:
        """Return the label at the first free spot (start of its baseline); else ""."""
        boxes = [(x, y - 11, x + _LETTER * len(words), y + 4) for x, y in spots]
        free = [box for box in boxes if self._crossed(box) == 0]
        if not free and not always:
            return ""
        box = free[0] if free else min(boxes, key=self._crossed)
        self.taken.append(box)
        return f'<text class="{"roof" if always else "name"}" x="{box[0]:.1f}" y="{box[1] + 11:.1f}">{escape(words)}</text>'

    def _crossed(self, box: tuple[float, float, float, float]) -> int:
        left, top, right, bottom = box
        over = sum(left < r and right > x and top < b and bottom > y for x, y, r, b in self.taken)
        return over + 2 * (right > self.edge + 2 or left < _LEFT)


def _slope(plane: Plane, x: LogAxis, y: LogAxis) -> tuple[float, float, float, float]:
    """Return the memory slope from where it enters the plot to the highest roof."""
    highest = max(plane.roofs, key=lambda roof: roof.rate)
    slope = highest.rate / highest.ridge
    # It enters at the left edge, or at the bottom if that comes first.
    start = max(10.0**x.first, 10.0**y.first / slope)
    return x(start), y(start * slope), x(highest.ridge), y(highest.rate)


def _roof_names(plane: Plane, x: LogAxis, y: LogAxis, labels: Labels) -> Iterator[str]:
    x1, y1, x2, y2 = _slope(plane, x, y)
    # Above the slope and left of it, wherever there is room.
    wide = _LETTER * len(plane.slope_name) + 8
    along = ((x1 + (x2 - x1) * at / 20, y1 + (y2 - y1) * at / 20) for at in (10, 12, 8, 14, 6, 16, 4, 18, 2, 20))
    yield labels.place([(left - wide, top - 4) for left, top in along], plane.slope_name, always=True)
    for roof in plane.roofs:
        left, top = x(roof.ridge), y(roof.rate)
        wide = _LETTER * len(roof.name)
        starts = (left + 6, x.end - wide, left - wide - 6)
        # The memory slope passes above a lower roof.
        heights = (-6, 15, -22) if top <= y2 else (15, -6, -22)
        yield labels.place([(at, top + up) for up in heights for at in starts], roof.name, always=True)


def _mark(mark: Point, words: str) -> str:
    """Return a mark, whose shape differs by class for colour-blind readers, with words for those who point at it."""
    bound, x, y, size = mark.row.verdict.bound, mark.x, mark.y, mark.size
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    if bound is Bound.COMPUTE:
        wide, half = f"{size * 1.8:.1f}", size * 0.9
        shape = f'<rect x="{x - half:.1f}" y="{y - half:.1f}" width="{wide}" height="{wide}"/>'
    elif bound is Bound.LATENCY:
        low = f"{y + size:.1f}"
        shape = f'<path d="M{x:.1f} {y - size:.1f} L{x + size:.1f} {low} L{x - size:.1f} {low} Z"/>'
    return f'<g class="mark {bound.removesuffix("-bound")}" tabindex="0"><title>{escape(words)}</title>{shape}</g>'


def _names(marks: Sequence[Point], labels: Labels) -> Iterator[str]:
    """Yield the names of the longest rows, if there is room beside their marks."""
    for mark in marks[:_NAMED]:
        words = cut(mark.row.item.name, 26)
        wide, reach = _LETTER * len(words), mark.size + 4
        beside = [(mark.x + reach, mark.y + 4), (mark.x - reach - wide, mark.y + 4)]
        around = [(mark.x - wide / 2, mark.y + reach + 11), (mark.x - wide / 2, mark.y - reach)]
        yield labels.place([*beside, *around], words)


def roofline_page(analysis: Analysis) -> str:
    """Return the page."""
    title = escape(f"{analysis.profile.source} · {analysis.ceilings.gpu}")
    body = [f"<h1>{title}</h1>", *_body(analysis), '<div id="tip" class="tip" role="status" hidden></div>']
    return simple_page(title, *body, styles=("roofline.css",), scripts=("tips.js",))


def _body(analysis: Analysis) -> Iterator[str]:
    ceilings, precision = analysis.ceilings, analysis.ceilings.precision
    known = "measured on the card" if ceilings.measured else "as stated by its maker"
    rates = f"{ceilings.memory_bytes_per_s / 1e12:.2f} TB/s, {precision} {ceilings.rate(precision) / 1e12:,.0f} TFLOP/s"
    yield f"<p>Ceilings {known}: {rates}; they meet at {ceilings.ridge(precision):.0f} operations a byte.</p>"
    timeline = analysis.profile.timeline
    if timeline is not None and timeline.span_s:
        busy, host, queue = (part / timeline.span_s for part in (timeline.busy_s, timeline.host_s, timeline.queue_s))
        yield (
            f"<p>Of {seconds_words(timeline.span_s)} the card was busy {percent(busy)}; it waited for the host {percent(host)} "
            f"and in the queue {percent(queue)}.</p>"
        )
    plane = plane_of(analysis)
    if plane is not None:
        wide, narrow = svg(plane, describe), svg(plane, describe, width=NARROW_WIDTH, height=NARROW_HEIGHT)
        absent = len(analysis.rows) - len(plane.points)
        others = f" {absent} without counted arithmetic or bytes are in the table alone." if absent else ""
        caption = f"<figcaption>Areas are times; point at a mark for its figures.{others}</figcaption>"
        yield f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>{caption}</figure>'
    bounds = [
        (_key(bound), seconds_words(seconds), percent(analysis.part(seconds)), escape(MEANINGS[bound]))
        for bound, seconds in analysis.seconds_by_bound().items()
    ]
    yield "<h2>Time by bound</h2>" + table(("", "", "", ""), bounds, name="bounds", numbers=(1, 2))
    fixes = [(seconds_words(seconds), escape(what), escape(how)) for seconds, what, how in fixes_of(analysis)[:12]]
    yield "<h2>What to do</h2>" + table(("", "", ""), fixes, name="changes", numbers=(0,))
    yield f'<h2>All {len(analysis.rows)}</h2><div class="scroll"><table id="rows"><thead><tr>'
    yield "".join(f"<th>{column}</th>" for column in _COLUMNS) + "</tr></thead><tbody>"
    for row in analysis.rows:
        yield _table_row(row)
    yield "</tbody></table></div>"
    yield from (f"<p>{escape(note)}</p>" for note in analysis.profile.notes)


_COLUMNS = ("time", "expected", "calls", "bound", "of DRAM", "of the SMs", "FLOP/B", "what")


def _key(bound: Bound) -> str:
    return f'<span class="key {bound.removesuffix("-bound")}"></span>{bound}'


def describe(row: RooflineRow) -> str:
    """Return the hover text of a mark."""
    item, verdict = row.item, row.verdict
    parts = [f"{item.name} {item.detail}".strip(), f"{seconds_words(row.seconds)} in {item.calls:,} calls"]
    if item.work.intensity is not None:
        parts.append(f"{intensity_words(item.work.intensity)} FLOP/B")
    near = "" if verdict.share is None else f", {percent(verdict.share, 0)} of its ceiling"
    return "\n".join([*parts, f"{verdict.bound}{near}", row.advice])


def _table_row(row: RooflineRow) -> str:
    item, verdict = row.item, row.verdict
    shares = (verdict.memory_share, verdict.compute_share)
    numbers = ["–" if share is None else percent(share, 0) for share in shares] + [intensity_words(item.work.intensity)]
    expected = seconds_words(row.expected_s) if row.expected_s else ""
    cells = [seconds_words(row.seconds), expected, f"{item.calls:,}", _key(verdict.bound), *numbers]
    # On a narrow page the heading of a column stands in its cells.
    named = zip(_COLUMNS, cells, strict=False)
    figures = "".join(f'<td class="{_kind(name)}" data-name="{name}">{cell}</td>' for name, cell in named)
    what = escape(" ".join(filter(None, (item.group, item.name, item.detail))))
    kernels = escape("\n".join(item.kernels))
    return f'<tr>{figures}<td title="{kernels}">{what}</td></tr>'


def _kind(column: str) -> str:
    return "" if column == "bound" else "n"

"""The plot of a roofline as SVG, made here: log-log axes, roofs, a mark a row with its figures on hover.

Where operations are counted the axes are FLOP a byte and FLOP a second, and each precision has its roof. Where they are not
(a profile that knows how busy the pipes were, and no more) both axes are shares of the ceilings, and there is one roof.
Colours are the page's. It judges nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import atan2, ceil, degrees, floor, log10, sqrt

from tonnage.roofline import Analysis, Bound, Row

WIDTH, HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 20, 56
_SMALLEST, _LARGEST = 4.0, 18.0
# Decades that an axis shows at most: what lies beyond is drawn at its edge.
_DECADES = 9
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class Point:
    """A row in the plane."""

    x: float
    y: float
    row: Row


@dataclass(frozen=True, slots=True)
class Roof:
    """A rate, and the intensity from which on it holds."""

    name: str
    rate: float
    ridge: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """What is drawn, in its own units."""

    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    slope_name: str
    x_name: str
    y_name: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Whole decades onto pixels."""

    first: int
    last: int
    start: float
    end: float

    def __call__(self, value: float) -> float:
        decade = min(max(log10(value), self.first), self.last)
        return self.start + (decade - self.first) / (self.last - self.first) * (self.end - self.start)

    def ticks(self) -> range:
        """Decades."""
        return range(self.first, self.last + 1)


def plane_of(analysis: Analysis) -> Plane | None:
    """Rows that have a place; None where none has."""
    counted = tuple(_counted(analysis))
    if counted:
        return Plane(
            points=counted,
            roofs=tuple(_roofs(analysis, counted)),
            slope_name=f"memory {analysis.ceilings.memory_bytes_per_s / 1e12:.2f} TB/s",
            x_name="operations on each byte (FLOP/B)",
            y_name="operations a second (FLOP/s)",
        )
    shares = tuple(_shares(analysis))
    if not shares:
        return None
    return Plane(
        points=shares,
        roofs=(Roof("the SMs' pipes", 1.0, 1.0),),
        slope_name="DRAM",
        x_name="time that the SMs' pipes explain, over time that DRAM explains",
        y_name="share of the SMs' pipes",
    )


def _counted(analysis: Analysis) -> Iterator[Point]:
    for row in analysis.rows:
        intensity, operations = row.item.work.intensity, row.item.work.operations
        if intensity and operations and row.seconds:
            yield Point(intensity, operations / row.seconds, row)


def _shares(analysis: Analysis) -> Iterator[Point]:
    for row in analysis.rows:
        memory, compute = row.verdict.memory_share, row.verdict.compute_share
        if memory and compute:
            yield Point(compute / memory, compute, row)


def _roofs(analysis: Analysis, points: Sequence[Point]) -> Iterator[Roof]:
    ceilings = analysis.ceilings
    used = {ceilings.has(point.row.item.work.precision) for point in points} | {ceilings.precision}
    for name in sorted(used, key=lambda name: ceilings.rate(name)):
        yield Roof(f"{name} {ceilings.rate(name) / 1e12:,.0f} TFLOP/s", ceilings.rate(name), ceilings.ridge(name))


def svg(plane: Plane, describe: Callable[[Row], str]) -> str:
    """The whole picture."""
    x, y = _axes(plane)
    parts = [*_grid(plane, x, y), *_roof_lines(plane, x, y), *_marks(plane, x, y, describe)]
    label = f"Roofline: {plane.y_name} against {plane.x_name}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _axes(plane: Plane) -> tuple[Axis, Axis]:
    xs = [point.x for point in plane.points] + [
        value for roof in plane.roofs for value in (roof.ridge / 10, roof.ridge * 10)
    ]
    ys = [point.y for point in plane.points] + [roof.rate for roof in plane.roofs]
    right = ceil(log10(max(xs)))
    top = max(ceil(log10(max(ys) * 1.2)), floor(log10(min(ys))) + 1)
    left = max(floor(log10(min(xs))), right - _DECADES)
    bottom = max(floor(log10(min(ys))), top - _DECADES)
    return Axis(left, right, _LEFT, WIDTH - _RIGHT), Axis(bottom, top, HEIGHT - _BOTTOM, _TOP)


def _grid(plane: Plane, x: Axis, y: Axis) -> Iterator[str]:
    for decade in x.ticks():
        at = x(10.0**decade)
        yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{HEIGHT - _BOTTOM}"/>'
        yield f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_power(decade)}</text>'
    for decade in y.ticks():
        at = y(10.0**decade)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_power(decade)}</text>'
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    yield f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(plane.x_name)}</text>'
    yield (f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(plane.y_name)}</text>')


def _power(decade: int) -> str:
    if -3 <= decade < 0:
        return f"{10.0**decade:g}"
    if 0 <= decade < 3 * len(_PREFIXES):
        prefix = _PREFIXES[decade // 3]
        return f"{10 ** (decade % 3)} {prefix}".strip()
    return f"1e{decade}"


def _roof_lines(plane: Plane, x: Axis, y: Axis) -> Iterator[str]:
    """One slope for the memory, as far as the highest roof; each roof from its ridge on."""
    highest = max(plane.roofs, key=lambda roof: roof.rate)
    slope = highest.rate / highest.ridge
    # The slope enters at the left edge, or at the bottom where that comes first.
    start = max(10.0**x.first, 10.0**y.first / slope)
    ends = x(start), y(start * slope), x(highest.ridge), y(highest.rate)
    yield _line(*ends)
    yield _along(*ends, plane.slope_name)
    for roof in plane.roofs:
        yield _line(x(roof.ridge), y(roof.rate), WIDTH - _RIGHT, y(roof.rate))
        yield _label(x(roof.ridge) + 6, y(roof.rate) - 6, roof.name)


def _along(x1: float, y1: float, x2: float, y2: float, words: str) -> str:
    """A word above the middle of a slope."""
    turned = degrees(atan2(y2 - y1, x2 - x1))
    at = f'transform="translate({(x1 + x2) / 2:.1f} {(y1 + y2) / 2 - 8:.1f}) rotate({turned:.1f})"'
    return f'<text class="roof" {at} text-anchor="middle">{escape(words)}</text>'


def _label(x: float, y: float, words: str) -> str:
    return f'<text class="roof" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="roof" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _marks(plane: Plane, x: Axis, y: Axis, describe: Callable[[Row], str]) -> Iterator[str]:
    """Areas are times; the smallest are drawn last, on top."""
    longest = max(point.row.seconds for point in plane.points)
    for point in sorted(plane.points, key=lambda point: -point.row.seconds):
        size = max(_SMALLEST, _LARGEST * sqrt(point.row.seconds / longest))
        bound = point.row.verdict.bound
        yield (
            f'<g class="mark {bound.removesuffix("-bound")}" tabindex="0"><title>{escape(describe(point.row))}</title>'
            f"{_shape(bound, x(point.x), y(point.y), size)}</g>"
        )


def _shape(bound: Bound, x: float, y: float, size: float) -> str:
    """Classes differ in form too, for those who do not see colours."""
    if bound is Bound.COMPUTE:
        return f'<rect x="{x - size * 0.9:.1f}" y="{y - size * 0.9:.1f}" width="{size * 1.8:.1f}" height="{size * 1.8:.1f}"/>'
    if bound is Bound.LATENCY:
        return f'<path d="M{x:.1f} {y - size:.1f} L{x + size:.1f} {y + size:.1f} L{x - size:.1f} {y + size:.1f} Z"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'

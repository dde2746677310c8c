"""A roofline as text and as JSON values. It computes only shares and sums for display."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.text import Text

from tonnage import __version__
from tonnage.report.lines import bar, cut, heading, packed, print_sections, report_width, wrapped
from tonnage.roofline import MEANINGS, Analysis, Bound, Ceilings, GpuTime, RooflineRow
from tonnage.units import percent

ROWS = 16
_FIXES = 6
_BAR = 34
_WAITING = 0.1
_COLOURS = {
    Bound.MEMORY: "cyan",
    Bound.COMPUTE: "green",
    Bound.LATENCY: "yellow",
    Bound.LINK: "magenta",
    Bound.UNKNOWN: "dim",
}


def print_roofline(analysis: Analysis, *, stream: TextIO, rows: int = ROWS) -> None:
    """Print the report."""
    print_sections([roofline_lines(analysis, rows=rows)], stream)


def roofline_lines(analysis: Analysis, *, rows: int = ROWS) -> Iterator[Text | str]:
    """Yield ceilings, sums, rows and advice."""
    yield from _headline(analysis)
    yield ""
    if analysis.profile.timeline is not None:
        yield from _timeline(analysis.profile.timeline)
        yield ""
    yield from _sums(analysis)
    yield ""
    yield from _table(analysis, rows)
    yield ""
    yield from _slow(analysis)
    yield from _fixes(analysis)
    for note in analysis.profile.notes:
        yield ""
        yield from (Text(line, style="yellow") for line in wrapped(note))


def seconds_words(seconds: float) -> str:
    """Format a time with three digits in a suitable unit, like "3.54 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _headline(analysis: Analysis) -> Iterator[Text | str]:
    ceilings = analysis.ceilings
    yield from (Text(line, style="bold") for line in wrapped(f"{analysis.profile.source} · {ceilings.gpu}"))
    precision = ceilings.precision
    measured = {name.removeprefix("rates.") for name in ceilings.measured}
    known = "measured" if {"memory_bytes_per_s", precision} <= measured else "partly measured" if measured else "stated"
    yield from wrapped(
        f"ceilings, {known}: {ceilings.memory_bytes_per_s / 1e12:.2f} TB/s · {precision} "
        f"{ceilings.rate(precision) / 1e12:,.0f} TFLOP/s · they meet at {ceilings.ridge(precision):.0f} FLOP/B"
    )


def _timeline(timeline: GpuTime) -> Iterator[Text | str]:
    idle_s = timeline.host_s + timeline.queue_s
    words = f"{seconds_words(timeline.span_s)} from the first of {timeline.launches:,} kernels and copies to the last"
    yield from (Text(line, style="bold") for line in wrapped(words))
    for word, seconds in (
        ("card busy", timeline.busy_s),
        ("waits for the host", timeline.host_s),
        ("waits in the queue", timeline.queue_s),
    ):
        share = seconds / timeline.span_s if timeline.span_s else 0.0
        yield f"   {word:<20}{seconds_words(seconds):>9} {percent(share):>8}  {bar(share, _BAR)}".rstrip()
    if idle_s > _WAITING * timeline.span_s and timeline.host_s > timeline.queue_s:
        words = "the host is late: CUDA graphs or torch.compile, larger batches, fewer .item()"
        yield from wrapped(words, first="   ")


def _sums(analysis: Analysis) -> Iterator[Text | str]:
    total = analysis.seconds
    yield heading(f"{seconds_words(total)} " + ("of kernels and copies" if analysis.measured else "at best"))
    for bound, seconds in analysis.seconds_by_bound().items():
        share = analysis.part(seconds)
        line = Text(f"   {bound:<20}{seconds_words(seconds):>9} {percent(share):>8}")
        filled = bar(share, _BAR)
        yield line.append(f"  {filled}", style=_COLOURS[bound]) if filled else line
    if not analysis.measured:
        launches = sum(row.item.launches for row in analysis.rows)
        each = seconds_words(analysis.ceilings.launch_s)
        first = f"   {'the host, eager':<20}{seconds_words(analysis.host_s):>9}           "
        yield from wrapped(f"{launches:,} launches of {each}, beside it", first=first)
    for bound in analysis.seconds_by_bound():
        yield from (
            Text(line, style="dim") for line in wrapped(f"{bound}: {MEANINGS[bound]}", first="   ", rest="     ")
        )


def _table(analysis: Analysis, rows: int) -> Iterator[Text | str]:
    columns = f"{'DRAM':>5} {'SMs':>5}" if analysis.measured else f"{'FLOP/B':>7}"
    if _is_clocked(analysis):
        columns += f"{'clock':>7}"
    yield heading(f"{'time':>8} {'share':>7} {'calls':>6}  {'bound':<8}{columns}  what")
    for row in analysis.rows[:rows]:
        yield from _table_row(analysis, row)
    left = analysis.rows[rows:]
    if left:
        seconds = sum(row.seconds for row in left)
        yield f"  {seconds_words(seconds):>8} {percent(analysis.part(seconds)):>7}  {len(left)} more: --rows {len(analysis.rows)}"
    if analysis.measured:
        words = "DRAM, SMs: how much of the time its bytes and its operations explain"
        if _is_clocked(analysis):
            words += "; clock: how many times as long it took as such kernels do on this card"
        yield from (Text(line, style="dim") for line in wrapped(words, first="   "))


def _is_clocked(analysis: Analysis) -> bool:
    return any(row.expected_s is not None for row in analysis.rows)


def _slow(analysis: Analysis) -> Iterator[Text | str]:
    """Yield what took longer than such kernels do on this GPU."""
    measured_s, expected_s = analysis.expected
    if not expected_s:
        return
    words = f"{seconds_words(measured_s)} where the clock expects {seconds_words(expected_s)} on this card"
    slow = analysis.slow_rows()
    yield heading(words + (", and the slow ones" if slow else ""))
    for row in slow[:_FIXES]:
        beyond_s = row.seconds - (row.expected_s or 0.0)
        first = f"  {seconds_words(beyond_s):>8}  "
        yield from wrapped(f"{row.item.name}  {row.item.detail}".strip(), first=first)
        took = f"{seconds_words(row.seconds)} for {seconds_words(row.expected_s or 0.0)}"
        yield from wrapped(f"{took}, {_three(row.slower or 0.0)} times as long", first=" " * 12)
    yield ""


def _table_row(analysis: Analysis, row: RooflineRow) -> Iterator[Text]:
    """Yield a row with its full name if possible: what does not fit goes below, and kernel names are shortened."""
    item, verdict = row.item, row.verdict
    line = Text(f"  {seconds_words(row.seconds):>8} {percent(analysis.part(row.seconds)):>7} {item.calls:>6,}  ")
    line.append(f"{verdict.bound.removesuffix('-bound'):<8}", style=_COLOURS[verdict.bound])
    if analysis.measured:
        memory = verdict.share if verdict.bound is Bound.LINK else verdict.memory_share
        line.append(f"{_percent(memory):>5} {_percent(verdict.compute_share):>5}")
    else:
        line.append(f"{intensity_words(item.work.intensity):>7}")
    if _is_clocked(analysis):
        line.append(f"{_three(row.slower) + ' ×' if row.slower else '–':>7}")
    line.append("  ")
    first = " " * line.cell_len
    words = packed([cut(item.name, report_width() - len(first)), item.detail], first=first, gap="  ")
    yield line.append(words[0][len(first) :])
    yield from map(Text, words[1:])


def _percent(share: float | None) -> str:
    return "–" if share is None else percent(share, 0)


def intensity_words(intensity: float | None) -> str:
    """Format operations per byte; empty if there are none or they are unknown."""
    if intensity is None:
        return ""
    return f"{intensity:,.0f}" if intensity >= 10 else f"{intensity:.1f}"


def _fixes(analysis: Analysis) -> Iterator[Text | str]:
    fixes = fixes_of(analysis)[:_FIXES]
    if not fixes:
        return
    yield heading("what to do" + (", by the time beyond its bound" if analysis.measured else ", by time"))
    for seconds, name, advice in fixes:
        yield from wrapped(name, first=f"  {seconds_words(seconds):>8}  ")
        yield from wrapped(advice, first=" " * 12)


def fixes_of(analysis: Analysis) -> list[tuple[float, str, str]]:
    """Return seconds at stake, their owner, and what to try, merging equal advice."""
    alike: dict[tuple[str, str], list[RooflineRow]] = defaultdict(list)
    for row in analysis.rows:
        alike[row.item.name if analysis.measured else "", row.advice].append(row)
    found = []
    for (_, advice), rows in alike.items():
        # For a measured row, what its bound does not explain; for a predicted or unclassified one, all of it.
        judged = [analysis.measured and row.verdict.bound is not Bound.UNKNOWN for row in rows]
        at_stake_s = sum(row.lost_s if known else row.seconds for row, known in zip(rows, judged, strict=True))
        found.append((at_stake_s, _named(rows), advice))
    return sorted((fix for fix in found if fix[0] > 0), key=lambda fix: -fix[0])


def _named(rows: Sequence[RooflineRow]) -> str:
    names = list(dict.fromkeys(row.item.name for row in rows))
    if len(names) > 1:
        return "; ".join(names)
    name = names[0]
    return f"{name}, {len(rows)} kinds" if len(rows) > 1 else f"{name}  {rows[0].item.detail}".strip()


# ── JSON values ──


def roofline_figures(analysis: Analysis) -> dict[str, object]:
    """Return JSON values with stable keys. Times are in seconds, sizes in bytes; unknown values are null."""
    profile, timeline = analysis.profile, analysis.profile.timeline
    return {
        "tonnage": __version__,
        "kind": profile.kind,
        "source": profile.source,
        "gpu": analysis.ceilings.gpu,
        "ceilings": ceiling_figures(analysis.ceilings),
        "measured": analysis.measured,
        "seconds": analysis.seconds,
        "expected_seconds": analysis.expected[1] or None,
        "seconds_by_bound": {str(bound): seconds for bound, seconds in analysis.seconds_by_bound().items()},
        "host_launch_seconds": analysis.host_s,
        "timeline": asdict(timeline) if timeline else None,
        "items": [_row_figures(row) for row in analysis.rows],
        "fixes": [{"seconds": seconds, "what": what, "change": change} for seconds, what, change in fixes_of(analysis)],
        "classes": {str(bound): meaning for bound, meaning in MEANINGS.items()},
        "notes": list(profile.notes),
    }


def ceiling_figures(ceilings: Ceilings) -> dict[str, Any]:
    """Return the ceilings, and which of them a probe measured."""
    return {
        "memory_bytes_per_s": ceilings.memory_bytes_per_s,
        "rates": dict(ceilings.rates),
        "host_link_bytes_per_s": ceilings.host_link_bytes_per_s,
        "kernel_floor_s": ceilings.kernel_floor_s,
        "launch_s": ceilings.launch_s,
        "measured": list(ceilings.measured),
    }


def _row_figures(row: RooflineRow) -> dict[str, Any]:
    item, verdict = row.item, row.verdict
    return {
        "name": item.name,
        "detail": item.detail,
        "group": item.group,
        "kernels": list(item.kernels),
        "calls": item.calls,
        "launches": item.launches,
        "seconds": row.seconds,
        "operations": item.work.operations,
        "moved_bytes": item.work.moved_bytes,
        "precision": item.work.precision if item.work.operations else None,
        "flop_per_byte": item.work.intensity,
        "bound": str(verdict.bound),
        "because": verdict.because,
        "memory_share": verdict.memory_share,
        "compute_share": verdict.compute_share,
        "share": verdict.share,
        "bound_seconds": verdict.bound_s,
        "expected_seconds": row.expected_s,
        "advice": row.advice,
    }

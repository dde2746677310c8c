"""A roofline as text and as JSON values. It computes only shares and sums for display."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

from rich.text import Text

from tonnage import __version__
from tonnage.report.lines import cut, heading, ledger_row, packed, picked, report_width, said, spaced, wrapped
from tonnage.roofline import Analysis, Bound
from tonnage.roofline.analysis import MEANINGS, RooflineRow
from tonnage.units import percent

ROWS = 16
_FIXES = 6
_WAITS = ("card busy", "waits for the host", "waits in the queue")
_WAITING = 0.1
_COLOURS = {
    Bound.MEMORY: "cyan",
    Bound.COMPUTE: "green",
    Bound.LATENCY: "yellow",
    Bound.LINK: "magenta",
    Bound.UNKNOWN: "dim",
}


def roofline_lines(analysis: Analysis, *, rows: int = ROWS) -> Iterator[Text | str]:
    """Yield ceilings, sums, rows and advice."""
    ceilings, precision = analysis.ceilings, analysis.ceilings.precision
    measured = {name.removeprefix("rates.") for name in ceilings.measured}
    known = "measured" if {"memory_bytes_per_s", precision} <= measured else "partly measured" if measured else "stated"
    words = (
        f"ceilings, {known}: {ceilings.memory_bytes_per_s / 1e12:.2f} TB/s · {precision} "
        f"{ceilings.rate(precision) / 1e12:,.0f} TFLOP/s · they meet at {ceilings.ridge(precision):.0f} FLOP/B"
    )
    head: list[Text | str] = [*said(f"{analysis.profile.source} · {ceilings.gpu}", "bold"), *wrapped(words)]
    notes = [list(said(note, "yellow")) for note in analysis.profile.notes]
    table, fixes = _table(analysis, rows), _fixes(analysis)
    yield from ("", *spaced(head, _waits(analysis), _bounds(analysis), table, _slow(analysis), fixes, *notes), "")


def _waits(analysis: Analysis) -> Iterator[Text | str]:
    """Yield how long the card was busy, and what it waited for."""
    timeline = analysis.profile.timeline
    if timeline is None:
        return
    span_s, parts = timeline.span_s, zip(_WAITS, (timeline.busy_s, timeline.host_s, timeline.queue_s), strict=True)
    words = f"{seconds_words(span_s)} from the first of {timeline.launches:,} kernels and copies to the last"
    yield from said(words, "bold")
    for word, seconds in parts:
        yield _share_row(word, seconds, seconds / span_s if span_s else 0.0)
    if timeline.host_s + timeline.queue_s > _WAITING * span_s and timeline.host_s > timeline.queue_s:
        words = "the host is late: CUDA graphs or torch.compile, larger batches, fewer .item()"
        yield from wrapped(words, first="   ")


def _bounds(analysis: Analysis) -> Iterator[Text | str]:
    """Yield the time by what bounds it."""
    yield heading(f"{seconds_words(analysis.seconds)} " + ("of kernels and copies" if analysis.measured else "at best"))
    for bound, seconds in analysis.seconds_by_bound().items():
        row = _share_row(bound, seconds, analysis.part(seconds))
        row.stylize(_COLOURS[bound], 41)
        yield row
    if not analysis.measured:
        launches = sum(row.item.launches for row in analysis.rows)
        first = f"   {'the host, eager':<20}{seconds_words(analysis.host_s):>9}           "
        words = f"{launches:,} launches of {seconds_words(analysis.ceilings.launch_s)}, beside it"
        yield from wrapped(words, first=first)
    for bound in analysis.seconds_by_bound():
        yield from said(f"{bound}: {MEANINGS[bound]}", "dim", first="   ", rest="     ")


def _share_row(word: str, seconds: float, share: float) -> Text:
    return ledger_row(f" {word}", f"{seconds_words(seconds):>9} ", share, width=21, cells=34, wide=8)


def seconds_words(seconds: float) -> str:
    """Format a time with three digits in a suitable unit, like "3.54 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


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
        yield from said(words, "dim", first="   ")


def _is_clocked(analysis: Analysis) -> bool:
    return any(row.expected_s is not None for row in analysis.rows)


def _slow(analysis: Analysis) -> Iterator[Text | str]:
    """Yield what took longer than such kernels do on this GPU."""
    measured_s, expected_s = analysis.expected
    if not expected_s:
        return
    slow = analysis.slow_rows()
    words = f"{seconds_words(measured_s)} where the clock expects {seconds_words(expected_s)} on this card"
    yield heading(words + (", and the slow ones" if slow else ""))
    for row in slow[:_FIXES]:
        expected_s = row.expected_s or 0.0
        first = f"  {seconds_words(row.seconds - expected_s):>8}  "
        yield from wrapped(f"{row.item.name}  {row.item.detail}".strip(), first=first)
        took = f"{seconds_words(row.seconds)} for {seconds_words(expected_s)}"
        yield from wrapped(f"{took}, {_three(row.slower or 0.0)} times as long", first=" " * 12)


def _table_row(analysis: Analysis, row: RooflineRow) -> Iterator[Text]:
    """Yield a row with its full name if possible: what does not fit goes below, and kernel names are shortened."""
    item, verdict = row.item, row.verdict
    line = Text(f"  {seconds_words(row.seconds):>8} {percent(analysis.part(row.seconds)):>7} {item.calls:>6,}  ")
    line.append(f"{verdict.bound.removesuffix('-bound'):<8}", style=_COLOURS[verdict.bound])
    if analysis.measured:
        memory = verdict.share if verdict.bound is Bound.LINK else verdict.memory_share
        line.append(f"{share_words(memory):>5} {share_words(verdict.compute_share):>5}")
    else:
        line.append(f"{intensity_words(item.work.intensity):>7}")
    if _is_clocked(analysis):
        line.append(f"{_three(row.slower) + ' ×' if row.slower else '–':>7}")
    line.append("  ")
    first = " " * line.cell_len
    words = packed([cut(item.name or "(no name)", report_width() - len(first)), item.detail], first=first, gap="  ")
    yield line.append(words[0][len(first) :])
    yield from map(Text, words[1:])


def share_words(share: float | None) -> str:
    """Format a share like "63 %", or a dash if it is unknown."""
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
        names = "; ".join(dict.fromkeys(row.item.name for row in rows))
        if len(rows) == 1:
            names = f"{names}  {rows[0].item.detail}".strip()
        elif len({row.item.name for row in rows}) == 1:
            names += f", {len(rows)} kinds"
        found.append((at_stake_s, names, advice))
    return sorted((fix for fix in found if fix[0] > 0), key=lambda fix: -fix[0])


def roofline_figures(analysis: Analysis) -> dict[str, object]:
    """Return JSON values with stable keys. Times are in seconds, sizes in bytes; unknown values are null."""
    profile, timeline, ceilings = analysis.profile, analysis.profile.timeline, analysis.ceilings
    items = [
        picked(row.item, "name detail group")
        | {"kernels": list(row.item.kernels), **picked(row.item, "calls launches"), "seconds": row.seconds}
        | picked(row.item.work, "operations moved_bytes")
        | {"precision": row.item.work.precision if row.item.work.operations else None}
        | {"flop_per_byte": row.item.work.intensity}
        | picked(row.verdict, "bound because memory_share compute_share share bound_seconds:bound_s")
        | picked(row, "expected_seconds:expected_s advice")
        for row in analysis.rows
    ]
    return {
        "tonnage": __version__,
        **picked(profile, "kind source"),
        "gpu": ceilings.gpu,
        "ceilings": {
            "memory_bytes_per_s": ceilings.memory_bytes_per_s,
            "rates": dict(ceilings.rates),
            **picked(ceilings, "host_link_bytes_per_s kernel_floor_s launch_s"),
            "measured": list(ceilings.measured),
        },
        **picked(analysis, "measured seconds"),
        "expected_seconds": analysis.expected[1] or None,
        "seconds_by_bound": {str(bound): seconds for bound, seconds in analysis.seconds_by_bound().items()},
        "host_launch_seconds": analysis.host_s,
        "timeline": asdict(timeline) if timeline else None,
        "items": items,
        "fixes": [{"seconds": seconds, "what": what, "change": change} for seconds, what, change in fixes_of(analysis)],
        "classes": {str(bound): meaning for bound, meaning in MEANINGS.items()},
        "notes": list(profile.notes),
    }

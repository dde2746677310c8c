"""`tonnage replay`: a recorded sequence of allocator events through the model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.text import Text

    from tonnage.allocator.replay import Occupancy, ReplayResult
    from tonnage.explain import Fix
    from tonnage.recording.records import Note

SEGMENT_ROWS = 8
DIFFERENCE_ROWS = 5


def replay(
    trace: Path = typer.Argument(help="A JSON list of [action, address, size, stream], or a snapshot of PyTorch."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
) -> None:
    """Replay a trace of allocator events: peaks, segments and fragmentation.

    Exits 1 where the model and the trace disagree.
    """
    from tonnage.allocator.replay import replay as replay_events
    from tonnage.errors import BadTrace
    from tonnage.explain.fixes import expandable_segments
    from tonnage.recording.layout import is_database
    from tonnage.recording.snapshot import read_traced
    from tonnage.report.lines import print_lines
    from tonnage.report.output import write_json
    from tonnage.untrusted import printable

    if is_database(trace):
        raise BadTrace(f"{trace} is a recording, not a trace of events.", hint=f"Look at it with: tonnage show {trace}")
    traced = read_traced(trace)
    result = replay_events(traced.events, traced.settings, traced.start)
    advice = expandable_segments(traced.recording)
    if json:
        saved = advice.saves_bytes if advice else 0
        write_json(json, result.as_json() | {"expandable_segments_save_bytes": saved})
    if json != "-":
        print_lines(report(printable(trace.name), result, traced.recording.notes, advice), sys.stdout)
    raise typer.Exit(bool(result.differences))


def report(name: str, result: ReplayResult, notes: Sequence[Note], advice: Fix | None) -> Iterator[Text | str]:
    """The lines that people read."""
    from rich.text import Text

    from tonnage.report.lines import cut, packed, report_width, spread, table_unit, wrapped
    from tonnage.units import format_bytes

    verdict = Text(f"{len(result.differences):,} differences", "red") if result.differences else Text("exact", "green")
    yield from spread(Text(f"  {cut(name, report_width() - 46)} · {result.events:,} events"), verdict)
    peaks = (("allocated", result.peak_allocated_bytes), ("reserved", result.peak_reserved_bytes))
    yield from packed((f"{word} {format_bytes(size)}" for word, size in peaks), first="  peak ")
    if result.ooms:
        yield f"  {result.ooms} out of memory"
    # What the trace does not tell.
    older, freed, lost = (f"{n:,} blocks" for n in (result.older_blocks, result.unknown_frees, result.lost_frees))
    older = f"It begins in mid-run: {older} ({format_bytes(result.older_bytes)}) were allocated before its first event"
    strays = sum(note.count for note in notes if note.operator == "blocks without a segment")
    astray = (
        f"{strays:,} blocks lie in no segment that the file tells of: where the model would put them is its own guess."
    )
    for count, words in (
        (result.older_blocks, f"{older}, and peaks from before are not known."),
        (result.unknown_frees, f"{freed} were freed that it never allocated: it begins in mid-run, or lost events."),
        (result.lost_frees, f"{lost} were allocated where one was in use: the events that freed it are missing."),
        (strays if result.differences else 0, astray),
    ):
        yield from wrapped(words) if count else ()
    for difference in result.differences[:DIFFERENCE_ROWS]:
        yield from wrapped(difference.words, first=f"   event {difference.event}: ", rest="     ")
    if len(result.differences) > DIFFERENCE_ROWS:
        yield f"   and {len(result.differences) - DIFFERENCE_ROWS:,} more: --json"
    unit = table_unit(result.peak_reserved_bytes)
    yield from _occupancy("at the peak of allocated memory", result.at_peak_allocated, unit)
    yield from _occupancy("at the peak of reserved memory", result.at_peak_reserved, unit)
    yield from _segments(result, unit)
    if advice:
        yield ""
        yield f"  to save {format_bytes(advice.saves_bytes)} of reserved memory"
        yield from wrapped(advice.how, first="   ")


def _occupancy(title: str, moment: Occupancy, unit: str) -> Iterator[Text | str]:
    from tonnage.report.lines import column, heading, ledger_row

    requested = moment.allocated_bytes + moment.pending_bytes - moment.rounding_bytes
    yield ""
    yield heading(title)
    for word, size in (("requested", requested), ("rounding", moment.rounding_bytes), ("unused", moment.unused_bytes)):
        share = size / max(moment.reserved_bytes, 1)
        yield ledger_row(word, f"{column(size, unit)}  ", share, width=18, cells=36)


def _segments(result: ReplayResult, unit: str) -> Iterator[Text | str]:
    from tonnage.report.lines import column, heading
    from tonnage.units import format_bytes

    counts = Counter((segment.size_bytes, segment.stream) for segment in result.segments)
    ranked = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])
    kind = "mappings" if any(segment.is_expandable for segment in result.segments) else "segments"
    yield ""
    yield heading(f"{len(result.segments)} {kind}, the largest sums")
    for (size, stream), count in ranked[:SEGMENT_ROWS]:
        yield f"  {column(size * count, unit)}  {count:5} × {format_bytes(size):>11}  stream {stream}"
    rest = ranked[SEGMENT_ROWS:]
    if rest:
        total = sum(size * count for (size, _), count in rest)
        yield f"  {column(total, unit)}  {sum(count for _, count in rest):5} others"

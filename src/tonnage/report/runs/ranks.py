"""The report of a cluster's ranks: a table with one line per kind, outliers marked, then one rank in full."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from tonnage.explain import Advice, advice_for
from tonnage.recording import ClusterRecording, ClusterSummary
from tonnage.recording.cluster import COMMUNICATORS
from tonnage.report.lines import column, heading, packed, picked, print_sections, report_width, said, spread, table_unit
from tonnage.report.output import wants_report, write_json, write_page
from tonnage.report.runs.host import ranks_host_lines
from tonnage.report.runs.odd_ranks import Comparison, compare_ranks, spans_of
from tonnage.report.runs.terminal import card_figures, report_sections, write_lines
from tonnage.report.runs.total import CLIMBS
from tonnage.report.step_time import rank_time_lines, time_figures
from tonnage.units import format_bytes

_VERDICTS = {
    "ok": ("fits", "bold green"),
    "oom": ("does not fit", "bold red"),
    "error": ("failed", "bold yellow"),
    "depends": ("depends on unknown values", "bold yellow"),
}
_NAMES_WIDTH = 23
_WIDE = 80
_ODD = "◂"
_MOST_ODD = 4


def publish_ranks(
    cluster: ClusterRecording,
    *,
    json_target: str = "",
    page: Path | None = None,
    opens: bool = False,
    verbose: bool = False,
) -> None:
    """Publish a report, or the requested output instead."""
    worst = cluster.summary.worst
    advice = advice_for(cluster.recording_of(worst)) if worst is not None else Advice()
    if json_target:
        write_json(json_target, cluster_figures(cluster, advice))
    if wants_report(json_target, page):
        print_ranks(cluster, advice, stream=sys.stdout, verbose=verbose)
    if page is not None:
        from tonnage.report.html import render_cluster_page

        write_page(page, render_cluster_page(cluster, advice), opens=opens, json_target=json_target)


def tell_round(words: str) -> None:
    """Say what is running now, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"  {words} ...", file=sys.stderr)


def tell_rank(summary: ClusterSummary, rank: int | None) -> None:
    """Say which rank a report is about (None: the worst)."""
    asked = summary.worst if rank is None else rank
    ran = next((each for each in summary.ranks if asked in each.stands_for), None)
    stands_in = f", for which rank {ran.rank} ran," if ran and ran.rank != asked else ""
    print(f"tonnage: rank {asked}{stands_in} of {summary.words}", file=sys.stderr)


def cluster_figures(cluster: ClusterRecording, advice: Advice) -> dict[str, object]:
    """Return the values of the rank that needs most, with times of the slowest, and every rank that ran in `ranks`."""
    summary, worst = cluster.summary, cluster.summary.worst
    base: dict[str, Any] = {"gpu_key": summary.gpu}
    if worst is not None:
        base = card_figures(cluster.recording_of(worst), advice)
    if summary.slowest is not None:
        base |= time_figures(cluster.recording_of(summary.slowest.rank))
    found, ranks = compare_ranks(summary), []
    for rank in summary.ranks:
        figures = asdict(rank) | {"outcome": "stopped" if rank.stopped else rank.outcome}
        del figures["stopped"], figures["stands_for"]
        ranks.append({"rank": figures.pop("rank"), "ranks_alike": len(rank.stands_for), **figures})
    return base | {
        "outcome": summary.outcome,
        "fits": {"ok": True, "oom": False}.get(summary.outcome),
        "error": summary.trouble or base.get("error", ""),
        **picked(summary, "exit_status world_size:gpus hosts gpus_per_host dies_first"),
        "writes": asdict(summary.writes),
        "rank": worst,
        "slowest_rank": summary.slowest.rank if summary.slowest else None,
        "typical_rank": found.typical.first.rank if found.typical else None,
        "odd_ranks": [rank for kind in found.odd for rank in kind.ranks],
        "host_needed_bytes": sum(rank.host_bytes for rank in summary.host_ranks),
        "ranks": ranks,
    }


def print_ranks(cluster: ClusterRecording, advice: Advice, *, stream: TextIO, verbose: bool) -> None:
    """Print the cluster, its ranks, what went wrong between them, and one rank in full."""
    summary, found = cluster.summary, compare_ranks(cluster.summary)
    worst, engines = next((rank for rank in summary.ranks if rank.rank == summary.worst), None), []
    for name, size in (worst.held_by_engines if worst else {}).items():
        beside = "(beside the allocator)" if name == COMMUNICATORS else ""
        engines += packed((f"{name:<25}{format_bytes(size):>11}", beside))
    title = [heading(f"held by the engines at the peak of rank {worst.rank}")] if worst and engines else []
    climbs = advice.outlook.climb and summary.outcome == "ok"
    verdict = Text(*((CLIMBS, "bold yellow") if climbs else _VERDICTS[summary.outcome]))
    head = [*spread(Text(f"  {summary.words}", style="bold"), verdict)]
    if summary.ranks and summary.outcome not in ("error", "depends"):
        ran, every = len(summary.ranks), summary.gpus
        head.append(Text(f"  {ran} of {every} ranks ran and stand for all" if ran < every else "  every rank ran"))
    sections: list[Iterable[Text | str]] = [
        head,
        said(summary.trouble, "red"),
        rank_time_lines(cluster),
        _table(found),
        ranks_host_lines(summary),
        [*title, *engines],
    ]
    if summary.worst is not None:
        full = report_sections(cluster.recording_of(summary.worst), advice, verbose=verbose)
        why = "needs most" if summary.dies_first is None else "dies first"
        sections += [[heading(f"rank {summary.worst}, which {why}")], *full]
    sections.append(write_lines(summary.writes, str(Path.cwd()), verbose=verbose))
    print_sections(sections, stream)


def _table(found: Comparison) -> Iterator[Text]:
    """Yield one line per group of equal ranks, then how the outliers differ from most."""
    if not found.kinds:
        return
    # A narrow report omits allocated bytes: what the process holds matters more.
    narrow = report_width() < _WIDE
    width = _NAMES_WIDTH - 6 * narrow
    heads = "".join(f"{head:>13}" for head in ("allocated", "reserved", "process")[narrow:])
    yield Text(f"  {'rank':<{width - 2}}{heads}", style="bold")
    unit = table_unit(max(kind.first.peak_reserved_bytes for kind in found.kinds))
    for kind in found.kinds:
        rank = kind.first
        sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.peak_process_bytes)[narrow:]
        cells = "  ".join(column(size, unit) for size in sizes)
        style = {"out of memory": "red", "failed": "yellow"}.get(kind.verdict, "")
        # "0–3, 8 (5)": as many ranges as fit.
        count = f" ({len(kind.ranks)})" if len(kind.ranks) > 1 else ""
        names = spans_of(kind.ranks, width - 1 - len(count)) + count
        row = Text(f"  {names:<{width}}{cells}  ") + Text(kind.verdict, style=style)
        if kind in found.odd:
            row.append(f" {_ODD}" if kind.verdict else _ODD, style="bold")
        row.rstrip()
        yield row
    for kind in found.odd[:_MOST_ODD]:
        yield from said(found.words_of(kind), first=f"  {_ODD} ")
    if len(found.odd) > _MOST_ODD:
        yield Text(f"    and {len(found.odd) - _MOST_ODD} kinds more that stand out")

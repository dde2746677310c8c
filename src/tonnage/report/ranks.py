"""The report of a cluster's ranks: a table with one line for ranks alike, then the one that needs most in full.

Figures for programs are those of that rank, with every rank that ran in `ranks`. Nothing is computed here but layout.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from tonnage.explain import Advice, advice_for
from tonnage.report.figures import card_figures
from tonnage.report.lines import WIDTH, column, heading, spread, table_unit
from tonnage.report.output import STANDARD_OUTPUT, write_json
from tonnage.report.terminal import report_sections
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from tonnage.virtual.cluster import ClusterRun, RankRun

_VERDICTS = {"ok": ("fits", "bold green"), "oom": ("does not fit", "bold red"), "error": ("failed", "bold yellow")}
_NAMES_WIDTH = 23


def publish_ranks(run: "ClusterRun", *, json_target: str = "", verbose: bool = False) -> None:
    """A report for people and, where asked for, figures for programs."""
    advice = advice_for(run.worst.recording) if run.worst else Advice()
    if json_target:
        write_json(json_target, cluster_figures(run, advice))
    print_ranks(run, advice, stream=sys.stderr if json_target == STANDARD_OUTPUT else sys.stdout, verbose=verbose)


def tell_round(words: str) -> None:
    """What runs now, where somebody watches."""
    if sys.stderr.isatty():
        print(f"  {words} ...", file=sys.stderr)


# For programs


def cluster_figures(run: "ClusterRun", advice: Advice) -> dict[str, object]:
    """The figures of the rank that needs most, and all ranks."""
    worst = run.worst
    base: dict[str, Any] = card_figures(worst.recording, advice) if worst else {"gpu_key": run.cluster.gpu.key}
    return base | {
        "outcome": run.outcome,
        "fits": {"ok": True, "oom": False, "error": None}[run.outcome],
        "error": run.trouble or base.get("error", ""),
        "exit_status": run.exit_status,
        "world_size": run.cluster.gpus,
        "hosts": run.cluster.hosts,
        "gpus_per_host": run.cluster.gpus_per_host,
        "dies_first": run.dies_first.rank if run.dies_first else None,
        "rank": worst.rank if worst else None,
        "ranks": [rank_figures(rank) for rank in run.ranks],
    }


def rank_figures(run: "RankRun") -> dict[str, object]:
    """One rank that ran."""
    recording = run.recording
    return {
        "rank": run.rank,
        "ranks_alike": len(run.stands_for),
        "outcome": "stopped" if run.stopped else run.outcome,
        "error": recording.header.error,
        "peak_allocated_bytes": recording.peak_allocated_bytes,
        "peak_reserved_bytes": recording.peak_reserved_bytes,
        "peak_process_bytes": recording.peak_process_bytes,
        "ledger": {str(category): size for category, size in recording.ledger().bytes_by_category.items()},
        "engine_bytes": run.engine_bytes,
        "stream_bytes": _by_stream(run),
        "overhead_parts": recording.header.overhead_parts,
    }


def _by_stream(run: "RankRun") -> dict[str, int]:
    """Bytes at the peak by the stream that they were allocated on; "0" is the default stream."""
    found: dict[str, int] = {}
    for block in run.recording.live_at_peak:
        found[str(block.stream)] = found.get(str(block.stream), 0) + block.block_bytes
    return found


# For people


def print_ranks(run: "ClusterRun", advice: Advice, *, stream: TextIO, verbose: bool) -> None:
    """The cluster, its ranks, what went wrong between them, and one rank in full."""
    console = Console(file=stream, width=WIDTH, highlight=False, emoji=False)
    sections = [_headline(run), _trouble(run), _table(run.ranks), _engines(run.worst)]
    if run.worst:
        full = report_sections(run.worst.recording, advice, verbose=verbose)
        sections += [iter([heading(_which(run, run.worst))]), *full]
    console.print()
    for section in sections:
        lines = list(section)
        for line in lines:
            console.print(line, overflow="ignore", no_wrap=True, crop=False)
        if lines:
            console.print()


def _headline(run: "ClusterRun") -> Iterator[Text]:
    yield spread(Text(f"  {run.cluster.words}", style="bold"), Text(*_VERDICTS[run.outcome]))
    if run.ranks and run.outcome != "error":
        ran, every = len(run.ranks), run.cluster.gpus
        yield Text(f"  {ran} of {every} ranks ran and stand for all" if ran < every else "  every rank ran")


def _trouble(run: "ClusterRun") -> Iterator[Text]:
    yield from (Text(f"  {line}", style="red") for line in wrap(run.trouble, WIDTH - 4))


def _table(runs: Sequence["RankRun"]) -> Iterator[Text]:
    """Ranks with the same figures in one line."""
    if not runs:
        return
    yield Text(f"  {'rank':<{_NAMES_WIDTH}}{'allocated':>11}{'reserved':>13}{'process':>13}", style="bold")
    unit = table_unit(max(run.recording.peak_reserved_bytes for run in runs))
    for figures, alike in _alike(runs):
        *sizes, verdict = figures
        names = _names(sorted(rank for run in alike for rank in run.stands_for))
        cells = "  ".join(column(size, unit) for size in sizes)
        style = {"out of memory": "red", "failed": "yellow"}.get(verdict, "")
        yield Text(f"  {names:<{_NAMES_WIDTH}}{cells}  ") + Text(verdict, style=style)


def _alike(runs: Sequence["RankRun"]) -> list[tuple[tuple[Any, ...], list["RankRun"]]]:
    def figures(run: "RankRun") -> tuple[Any, ...]:
        recording = run.recording
        verdict = "stopped" if run.stopped else {"ok": "", "oom": "out of memory", "error": "failed"}[run.outcome]
        peaks = (recording.peak_allocated_bytes, recording.peak_reserved_bytes, recording.peak_process_bytes)
        return *peaks, verdict

    ordered = sorted(runs, key=lambda run: (figures(run), run.rank))
    grouped = [(key, list(found)) for key, found in groupby(ordered, key=figures)]
    return sorted(grouped, key=lambda entry: entry[1][0].rank)


def _names(ranks: Sequence[int]) -> str:
    """ "0–3, 8 (5)": as many spans as there is room for."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in spans]
    count = f" ({len(ranks)})" if len(ranks) > 1 else ""
    shown = ", ".join(words)
    if len(shown) + len(count) > _NAMES_WIDTH - 1:
        shown = f"{words[0]}, … {words[-1]}"
    return shown + count


def _engines(worst: "RankRun | None") -> Iterator[Text]:
    """What FSDP, DDP and NCCL hold for themselves."""
    if worst is None:
        return
    outside = {name: size for name, size in worst.recording.header.overhead_parts.items() if name.startswith("NCCL")}
    held = worst.engine_bytes | ({"communicators": sum(outside.values())} if outside else {})
    if held:
        yield heading(f"held by the engines at the peak of rank {worst.rank}")
    for name, size in held.items():
        beside = "   (beside the allocator)" if name == "communicators" else ""
        yield Text(f"  {name:<25}{format_bytes(size):>11}{beside}")


def _which(run: "ClusterRun", worst: "RankRun") -> str:
    return f"rank {worst.rank}, which {'dies first' if run.dies_first else 'needs most'}"

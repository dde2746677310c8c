"""What samples of many lengths do to a plan: its worst micro-batch, its padding, and other ways to batch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tonnage.report.lines import beside, report_width, wrapped
from tonnage.units import GIB, percent

if TYPE_CHECKING:
    from tonnage.planner.training.lengths import Lengths
    from tonnage.planner.training.search import BatchingChoice, PlanSearch

# Another way is mentioned if it gains this share.
_WORTH_A_WORD = 0.05


def length_words(findings: PlanSearch) -> Iterator[str]:
    """Yield the lengths, the worst micro-batch and its frequency, and the padding."""
    lengths, size = findings.request.lengths, int(findings.closest.configuration.micro_batch)
    if lengths is None:
        return
    yield f"samples have {lengths.mean:,.0f} tokens in the mean and {lengths.longest:,} at most" + (
        f"; {percent(lengths.cut)} are longer and cut" if lengths.cut else ""
    )
    tokens = int(lengths.worst(size)) * size
    often = lengths.at_worst(size)
    how = "the expected largest of an epoch" if lengths.batching == "padding-free" else "the largest of an epoch"
    rare = (
        "all are as large" if often > 0.995 else f"1 in {max(1 / max(often, 1e-9), 1):,.0f} comes within a tenth of it"
    )
    yield f"memory is that of {how}, {tokens:,} tokens in a micro-batch; {rare}"
    yield f"{percent(lengths.padding(size))} of what is computed is padding"
    if lengths.batching in ("pad", "bucket") and lengths.longest > lengths.values[0]:
        yield "shapes that change leave the allocator's memory in pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True"


def length_lines(findings: PlanSearch, choices: list[BatchingChoice]) -> Iterator[tuple[str, str]]:
    """Yield the same as a section, with a table of all ways; each line with its style."""
    lengths = findings.request.lengths
    if lengths is None:
        return
    yield "  lengths", "bold"
    for words in length_words(findings):
        yield from ((line, "") for line in wrapped(words, first="   ", rest="     "))
    yield f"   {'--batching':<14}{'micro-batch':>12}{'samples/s':>12}{'padding':>10}{'GiB':>9}", "bold"
    for batching, plan in choices:
        if plan is None:
            yield f"   {batching:<14}{'does not fit':>12}", ""
            continue
        size = int(plan.configuration.micro_batch)
        padding = percent(_of(lengths, batching).padding(size), 0)
        row = f"{size:>12,}{plan.sequences_per_s:>12,.4g}{padding:>10}{plan.total_bytes / GIB:>9,.1f}"
        yield from ((line, "") for line in beside(batching, min(report_width() - 46, 14), row, first="   "))
    yield from ((line, "") for line in wrapped(_advice(findings, choices), first="   ", rest="     "))


def _of(lengths: Lengths, batching: Any) -> Lengths:
    return replace(lengths, batching=batching)


def _advice(findings: PlanSearch, choices: list[BatchingChoice]) -> str:
    """Recommend the fastest way, if it is another."""
    known = [(plan.sequences_per_s, batching) for batching, plan in choices if plan is not None]
    if not known or findings.request.lengths is None:
        return ""
    fastest, best = max(known)
    if findings.best is None:
        return f"--batching {best} fits, at {fastest:,.4g} samples a second"
    gain = fastest / findings.best.sequences_per_s
    if gain < 1 + _WORTH_A_WORD:
        return "no other way trains more samples a second"
    return f"--batching {best} would train {gain:.1f} × as many samples a second"


def length_figures(findings: PlanSearch, choices: list[BatchingChoice]) -> dict[str, Any]:
    """Return the same as JSON values; empty if all samples have one length."""
    lengths, size = findings.request.lengths, int(findings.closest.configuration.micro_batch)
    if lengths is None:
        return {}
    figures = {
        "mean_tokens": lengths.mean,
        "longest_tokens": lengths.longest,
        "batching": lengths.batching,
        "share_cut": lengths.cut,
        "share_padding": lengths.padding(size),
        "worst_tokens": int(lengths.worst(size)) * size,
        "share_near_worst": lengths.at_worst(size),
        "batchings": [
            {
                "batching": batching,
                "fits": plan is not None,
                "micro_batch": int(plan.configuration.micro_batch) if plan else None,
                "samples_per_s": plan.sequences_per_s if plan else None,
                "share_padding": _of(lengths, batching).padding(int(plan.configuration.micro_batch)) if plan else None,
                "total_bytes": plan.total_bytes if plan else None,
            }
            for batching, plan in choices
        ],
    }
    return {"lengths": figures}

"""The host memory that a run needs, as text and as JSON values."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from tonnage.explain.causes.host import host_capacity_bytes, model_copies
from tonnage.recording import ClusterSummary, Recording
from tonnage.recording.host import CUDA, LIBRARIES, MAPPED, PYTHON, HostMoment, HostPeaks
from tonnage.report.lines import packed, picked, said, texts, wrapped
from tonnage.units import GIB, format_bytes

_LABELS = {
    "python": "Python",
    "cuda": "CUDA's context and libraries",
    "checkpoint": "checkpoint being read",
    "rounding": "rounded up by the allocator",
    "other": "other tensors",
}
# Less than this beside Python and its libraries is not mentioned.
_WORTH_BYTES = 2 * GIB


def host_lines(recording: Recording, *, verbose: bool = False) -> Iterator[Text]:
    """Yield what the host must have, where and for what, if it is large."""
    host = recording.host
    if host is None:
        return
    peak, capacity = host.peak, host_capacity_bytes(recording.header.gpu)
    own = sum(peak.parts.get(part, 0) for part in (PYTHON, LIBRARIES, CUDA))
    if not verbose and max(host.needed_bytes - own, host.mapped_peak_bytes) < _WORTH_BYTES:
        return
    of = f" of the {capacity / GIB:,.0f} GiB that come with the card" if capacity else ""
    at = f", at {peak.line}" if peak.line else ""
    short = bool(capacity) and host.needed_bytes > capacity
    words = f"host memory {format_bytes(host.needed_bytes)}{of}, {when_words(peak)}{at}"
    yield from said(words, "red" if short else "")
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    large = ((part, size) for part, size in parts if part != MAPPED and size >= GIB // 100)
    yield from texts(packed((f"{part_label(part)} {format_bytes(size)}" for part, size in large), first="    "))
    if host.mapped_peak_bytes >= GIB // 100:
        yield from texts(wrapped(mapped_words(host.mapped_peak_bytes), first="    "))


def when_words(moment: HostMoment) -> str:
    """Say when in the run it was."""
    return f"in step {moment.step}, {moment.phase}" if moment.step else "before any step"


def ranks_host_lines(summary: ClusterSummary) -> Iterator[Text]:
    """Yield the sum of a host's ranks, if it is large."""
    ranks = summary.host_ranks
    mapped = max((rank.host_mapped_bytes for rank in ranks), default=0)
    if max(sum(rank.host_bytes for rank in ranks), mapped) >= _WORTH_BYTES:
        sentences, short = ranks_host_words(summary)
        yield from (line for words in sentences for line in said(words, "red" if short else ""))


def ranks_host_words(summary: ClusterSummary) -> tuple[list[str], bool]:
    """Return the sum of a host's ranks, counting shared file pages once, and whether the host has less."""
    ranks = summary.host_ranks
    needed, most = sum(rank.host_bytes for rank in ranks), max((rank.host_bytes for rank in ranks), default=0)
    mapped = max((rank.host_mapped_bytes for rank in ranks), default=0)
    capacity = host_capacity_bytes(f"{summary.gpus_per_host}x{summary.gpu}")
    short = 0 < capacity < needed
    of = f", of a host's {capacity / GIB:,.0f}" if capacity else ""
    alike = most - min((rank.host_bytes for rank in ranks), default=0) <= 0.05 * most
    each = "per rank" if alike else "the fullest"
    words = [
        f"needs {needed / GIB:,.1f} GiB of host memory with {len(ranks)} ranks, {most / GIB:,.1f} of it {each}{of}"
    ]
    if mapped >= GIB // 100:
        words.append(f"{mapped_words(mapped)}, once for all ranks")
    if copies := model_copies(summary):
        spared = f"{copies.spared_bytes / GIB:,.1f} GiB less if one rank loads it (tonnage explain says how)"
        held = f"{copies.held_bytes / GIB:,.1f} GiB in all"
        words.append(f"{copies.copies} ranks each hold the whole model, {held}: {spared}")
    elif short:
        words.append("the host has not as much: load onto the card (device_map), or start fewer ranks at once")
    return words, short


def mapped_words(size: int) -> str:
    """Describe pages of mapped files."""
    return f"file cache for {format_bytes(size)} of mapped files, which the host may drop"


def part_label(part: str) -> str:
    """Return the label of a part of the ledger."""
    return _LABELS.get(part, part.replace("_", " "))


def host_figures(host: HostPeaks | None) -> dict[str, Any] | None:
    """Return JSON values. `needed_bytes` excludes pages of mapped files, `resident_peak_bytes` includes them."""
    if host is None:
        return None
    phases = {moment.phase: _moment_figures(moment) for moment in host.phases}
    sizes = picked(host, "needed_bytes mapped_peak_bytes mapped_file_bytes resident_peak_bytes")
    return sizes | {"peak": _moment_figures(host.peak), "phases": phases}


def _moment_figures(moment: HostMoment) -> dict[str, Any]:
    return asdict(moment) | {"needed_bytes": moment.needed_bytes, "parts": dict(moment.parts)}

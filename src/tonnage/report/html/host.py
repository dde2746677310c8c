"""Host memory as sections: parts, phases and largest tensors of one run; the ranks of a cluster's fullest host."""

from collections.abc import Iterator, Mapping

from tonnage.explain.causes.host import host_capacity_bytes
from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, Recording
from tonnage.recording.host import MAPPED, HostPeaks
from tonnage.report.host import mapped_words, part_label, ranks_host_words, when_words
from tonnage.report.html import markup
from tonnage.report.html.markup import share, size, text
from tonnage.report.html.sections import bar
from tonnage.report.lines import table_unit
from tonnage.report.odd_ranks import spans_of
from tonnage.units import MIB

# Host parts reuse colours of categories that only the GPU has.
_COLOURS = {
    "checkpoint": "kv_cache",
    "pinned": "inputs",
    "python": "context",
    "libraries": "tensors",
    "workers": "workspace",
    "shared_memory": "activations",
    "rounding": "fragmentation",
    MAPPED: "free",
}
_CATEGORIES = frozenset(map(str, Category))
_MOST_PHASES = 20
_LEAST_BYTES = MIB


def host_section(recording: Recording) -> str:
    """Return what the host must have at the peak, for what, and which lines made the largest tensors."""
    host = recording.host
    if host is None:
        return ""
    peak, capacity = host.peak, host_capacity_bytes(recording.header.gpu)
    of = f", {100 * host.needed_bytes / capacity:.1f} % of what comes with the card" if capacity else ""
    at = f' at <span class="line">{text(peak.line)}</span>' if peak.line else ""
    lead = f"<p>The host must have {size(host.needed_bytes)}{of}: the most is {when_words(peak)}{at}.</p>"
    filled = bar([(_colour(part), part_bytes) for part, part_bytes in _ranked(peak.parts)], host.needed_bytes)
    tables = f'<div class="pair"><div>{_parts(host)}</div><div>{_phases(host)}{_largest(host)}</div></div>'
    note = "Tensors of the CPU count whole from when they are made; what else the process holds was looked at."
    return markup.section("The host", lead, filled, tables, name="host", note=note)


def _parts(host: HostPeaks) -> str:
    parts, needed = host.peak.parts, host.needed_bytes
    unit = table_unit(needed)
    rows = [
        (markup.swatch(_colour(part)) + text(part_label(part)), size(bytes_, unit), share(bytes_, needed))
        for part, bytes_ in _ranked(parts)
    ]
    rows.append(("sum", size(needed, unit), ""))
    table = markup.table(("", "", ""), rows, name="host-rows", numbers=(1, 2))
    if not host.mapped_peak_bytes:
        return table
    return table + f'<p class="note">Beside it, at most: {mapped_words(host.mapped_peak_bytes)}.</p>'


def _phases(host: HostPeaks) -> str:
    unit = table_unit(host.needed_bytes)
    rows = [
        (text(moment.phase), size(moment.needed_bytes, unit), f'<span class="line">{text(moment.line)}</span>')
        for moment in sorted(host.phases, key=lambda moment: -moment.needed_bytes)[:_MOST_PHASES]
    ]
    return markup.table(("at most in", "", ""), rows, name="host-phases", numbers=(1,))


def _largest(host: HostPeaks) -> str:
    unit = table_unit(host.needed_bytes)
    rows = [
        (
            f"{group.count:,} × {text(part_label(group.part))}, {text(group.operator)}",
            size(group.size_bytes, unit),
            f'<span class="line">{text(group.line)}</span>',
        )
        for group in host.peak.largest
    ]
    return markup.table(("largest at that moment", "", ""), rows, name="host-largest", numbers=(1,)) if rows else ""


def cluster_host_section(summary: ClusterSummary) -> str:
    """Return the ranks of the host that needs most, each by its parts, and their sum."""
    ranks = summary.fullest_host
    if not ranks:
        return ""
    words, short = ranks_host_words(summary)
    kind = ' class="failure"' if short else ""
    sentences = (f"the run {words[0]}", *words[1:])
    said = "".join(f"<p{kind}>{text(line[:1].upper() + line[1:], 600)}.</p>" for line in sentences)
    numbers: dict[int, list[int]] = {}
    for number, rank in ranks.items():
        numbers.setdefault(rank.rank, []).append(number)
    shown = [(spans_of(of), len(of), next(r for r in summary.ranks if r.rank == ran)) for ran, of in numbers.items()]
    total: dict[str, int] = {}
    for rank in ranks.values():
        total = {part: total.get(part, 0) + rank.host_parts.get(part, 0) for part in {**total, **rank.host_parts}}
    parts = [part for part, _ in _ranked(total)]
    needed, most = sum(rank.host_bytes for rank in ranks.values()), max(rank.host_bytes for rank in ranks.values())
    unit = table_unit(needed)
    rows = []
    for names, count, rank in shown:
        filled = bar([(_colour(part), rank.host_parts.get(part, 0)) for part in parts], max(most, 1))
        who = f'{names} <span class="note">× {count}</span>' if count > 1 else names
        cells = (size(rank.host_parts[part], unit) if rank.host_parts.get(part) else "–" for part in parts)
        rows.append((who, *cells, size(rank.host_bytes, unit), filled))
    rows.append(("all", *(size(total[part], unit) for part in parts), size(needed, unit), ""))
    columns = ("rank", *(markup.column(_colour(part), part_label(part)) for part in parts), "sum", "")
    table = markup.table(columns, rows, name="host-rank-rows", numbers=range(1, len(columns) - 1))
    note = "Of the host whose ranks need most; their heights are taken to come at the same time."
    return markup.section("The host", said, table, name="host", note=note)


def _ranked(parts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield parts of at least a MiB, largest first, without pages of mapped files."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return ((part, bytes_) for part, bytes_ in ranked if part != MAPPED and bytes_ >= _LEAST_BYTES)


def _colour(part: str) -> str:
    return _COLOURS.get(part, part if part in _CATEGORIES else str(Category.OTHER))

"""Host memory as sections: parts, phases and largest tensors of one run; the ranks of a cluster's fullest host."""

from collections.abc import Iterator, Mapping, Sequence

from tonnage.explain.causes.host import host_capacity_bytes
from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, Recording
from tonnage.recording.host import MAPPED
from tonnage.report.html import markup
from tonnage.report.html.markup import bar, size, text
from tonnage.report.lines import table_unit
from tonnage.report.runs.host import mapped_words, part_label, ranks_host_words, when_words
from tonnage.report.runs.odd_ranks import spans_of
from tonnage.units import MIB, percent

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
    peak, needed, capacity = host.peak, host.needed_bytes, host_capacity_bytes(recording.header.gpu)
    of = f", {percent(needed / capacity)} of what comes with the card" if capacity else ""
    at = f' at <span class="line">{text(peak.line)}</span>' if peak.line else ""
    lead = f"<p>The host must have {size(needed)}{of}: the most is {when_words(peak)}{at}.</p>"
    parts, unit = [(_colour(part), part_label(part), held) for part, held in _ranked(peak.parts)], table_unit(needed)
    rows = [*markup.ledger(parts, needed, bars=False), ("sum", size(needed, unit), "")]
    table = markup.table(("", "", ""), rows, name="host-rows", numbers=(1, 2))
    if host.mapped_peak_bytes:
        table += f'<p class="note">Beside it, at most: {mapped_words(host.mapped_peak_bytes)}.</p>'
    # By phase, and the largest tensors of the host.
    moments = sorted(host.phases, key=lambda moment: -moment.needed_bytes)[:_MOST_PHASES]
    phases = [(text(moment.phase), moment.needed_bytes, moment.line) for moment in moments]
    groups = [
        (f"{group.count:,} × {text(part_label(group.part))}, {text(group.operator)}", group.size_bytes, group.line)
        for group in peak.largest
    ]
    beside = _places("at most in", phases, unit, "host-phases")
    beside += _places("largest at that moment", groups, unit, "host-largest") if groups else ""
    filled = bar([(colour, held) for colour, _, held in parts], needed)
    tables = f'<div class="pair"><div>{table}</div><div>{beside}</div></div>'
    note = "Tensors of the CPU count whole from when they are made; what else the process holds was looked at."
    return markup.section("The host", lead, filled, tables, name="host", note=note)


def _places(title: str, entries: Sequence[tuple[str, int, str]], unit: str, name: str) -> str:
    rows = [(words, size(held, unit), f'<span class="line">{text(line)}</span>') for words, held, line in entries]
    return markup.table((title, "", ""), rows, name=name, numbers=(1,))


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
    total: dict[str, int] = {}
    for number, rank in ranks.items():
        numbers.setdefault(rank.rank, []).append(number)
        total = {part: total.get(part, 0) + rank.host_parts.get(part, 0) for part in {**total, **rank.host_parts}}
    parts = [part for part, _ in _ranked(total)]
    needed, most = sum(rank.host_bytes for rank in ranks.values()), max(rank.host_bytes for rank in ranks.values())
    unit = table_unit(needed)
    rows = []
    for ran, of in numbers.items():
        rank = next(r for r in summary.ranks if r.rank == ran)
        filled = bar([(_colour(part), rank.host_parts.get(part, 0)) for part in parts], max(most, 1))
        who = f'{spans_of(of)} <span class="note">× {len(of)}</span>' if len(of) > 1 else spans_of(of)
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

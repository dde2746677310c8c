"""A cluster's recording as one HTML page that works offline: ranks side by side, and the full report of each kind.

A kind's report is its own page, compressed; the script unpacks it into a frame on demand. Recordings are read one after
another, which bounds both the page's size and the memory to make it. Each row of a table is a kind of ranks.
"""

import gzip
from base64 import b64encode
from collections.abc import Iterator, Sequence
from string import Template

from tonnage.explain import Advice, advice_for
from tonnage.recording import ClusterRecording, ClusterSummary, Recording
from tonnage.recording.cluster import COMMUNICATORS
from tonnage.report.html import markup, page
from tonnage.report.html.host import cluster_host_section
from tonnage.report.html.markup import embedded, policy, read_parts, sentence, share, size, text
from tonnage.report.html.series import STACKING, STRETCHES, line_of
from tonnage.report.html.step import sentence as step_sentence
from tonnage.report.lines import table_unit
from tonnage.report.runs.odd_ranks import BEYOND, LABELS, OUTSIDE, Comparison, Kind, compare_ranks, signed, spans_of
from tonnage.report.step_time import rank_words
from tonnage.units import format_bytes, percent

MOST_KINDS = 100
_SCRIPTS = ("common.js", "drawing.js", "lines.js", "cluster.js")
_SAMPLES = 6_000
_FEWEST_SAMPLES, _FEWEST_STRETCHES = 200, 400
PARTS = (*map(str, STACKING), BEYOND, OUTSIDE)
_COLOURS = {BEYOND: "fragmentation", OUTSIDE: "context"}
_NEAR = 1.6  # the capacity is drawn if it is at most this many times what is held
_BAR_UNITS = 1000
_NOTABLE = 0.01
_MOST_ODD = 8


def render_cluster_page(cluster: ClusterRecording, advice: Advice | None = None) -> str:
    """Return the page; `advice` is for the rank that needs most."""
    summary, found = cluster.summary, compare_ranks(cluster.summary)
    shown = found.kinds[:MOST_KINDS]
    worst = cluster.recording_of(summary.worst) if summary.worst is not None else None
    # Each kind's packed report, and its timeline.
    count, lines, reports = max(1, len(shown)), [], []
    samples, stretches = max(_FEWEST_SAMPLES, _SAMPLES // count), max(_FEWEST_STRETCHES, STRETCHES // count)
    for kind in shown:
        recording = cluster.recording_of(kind.first.rank)
        lines.append(line_head(kind, summary, found) | line_of(recording, samples))
        whole = page.render_page(recording, advice_for(recording), stretches=stretches)
        packed = b64encode(gzip.compress(whole.encode(), mtime=0)).decode()
        reports.append(f'<script type="text/plain" id="report-{kind.first.rank}">{packed}</script>')
    inner_style, inner_script = read_parts(*page.STYLES), read_parts(*page.SCRIPTS)
    style, script = read_parts(*page.STYLES, "lines.css", "cluster.css"), read_parts(*_SCRIPTS)
    # The step time of the rank that all others wait for.
    time = cluster.recording_of(summary.slowest.rank).step_time if summary.slowest else None
    step_words = step_sentence(time, rank_words(summary)) if time else ""
    ceiling = max(summary.capacity_bytes - worst.header.overhead_bytes, 0) if worst else 0
    return Template(read_parts("cluster.html")).substitute(
        policy=policy([style, inner_style], [script, inner_script]),
        title=text(title_of(summary)),
        style=style,
        tabs=tabs(shown, found),
        header=header_section(summary, found, worst, step_words, climbs=bool(advice and advice.outlook.climb)),
        ranks=ranks_section(summary, shown, found),
        hidden="" if shown else " hidden",
        engines=engines_section(shown),
        categories=categories_section(shown, found),
        host=cluster_host_section(summary),
        advice=page.advice_section(worst, advice, of=f"rank {summary.worst}") if worst and advice else "",
        reports="\n".join(reports),
        data=embedded({"lines": lines, "ceiling": ceiling}),
        script=script,
    )


def title_of(summary: ClusterSummary) -> str:
    """Return the script, or the cluster if no script is known."""
    return " ".join((summary.script or summary.words, *summary.arguments))


def header_section(
    summary: ClusterSummary, found: Comparison, worst: Recording | None, step_words: str = "", *, climbs: bool = False
) -> str:
    """Return the run, the cluster, the verdict, the step time, and which rank decides."""
    capacity = f"{summary.capacity_bytes / 2**30:.1f} GiB each" if summary.capacity_bytes else ""
    facts = page.run_facts(summary.words, capacity, worst.header if worst else None)
    trouble = f'<p class="failure" id="trouble">{text(summary.trouble, 2000)}</p>' if summary.trouble else ""
    step = f'<p id="step-words">{text(step_words)}</p>' if step_words else ""
    decides = ""
    if worst is not None:
        why = "needs most" if summary.dies_first is None else "dies first"
        is_one_of_many = len(found.kinds) > 1 or summary.dies_first is not None
        who = f"<p><strong>Rank {summary.worst} {why}.</strong></p> " if is_one_of_many else ""
        decides = f'<div id="decides">{who}{page.where(worst)}{page.failure(worst)}</div>'
    below = f'{trouble}<dl class="tiles">{"".join(_tiles(summary, found))}</dl>{step}{decides}'
    return markup.head(text(title_of(summary)), *page.verdict_pill(summary.outcome, climbs), facts, below)


def _tiles(summary: ClusterSummary, found: Comparison) -> Iterator[str]:
    ran, every, capacity = len(summary.ranks), summary.gpus, summary.capacity_bytes
    how = "every one ran" if ran == every else f"{ran:,} ran and stand for all"
    if summary.outcome in ("error", "depends"):
        how = f"{ran:,} reported" if ran else "none reported"
    yield markup.tile("ranks", f"{every:,}", how, name="tile-ranks", figure_kind=' class="figure"')
    if not found.kinds:
        return
    most, least = (choose(found.kinds, key=lambda kind: kind.process_bytes) for choose in (max, min))
    tiles = [("most", "each rank holds", most)]
    if len(found.kinds) > 1:
        verb = "hold" if found.most.endswith("s") else "holds"
        tiles = [("most", "the most a rank holds", most)]
        tiles += [("typical", f"{found.most} {verb}", found.typical)] if found.typical else []
        tiles.append(("least", "the least a rank holds", least))
    for name, title, kind in tiles:
        held = kind.process_bytes
        words = kind.name + (f", {percent(held / capacity, 0)} of the card" if capacity else "")
        yield markup.tile(title, size(held), words, name=f"tile-{name}")


def tabs(kinds: Sequence[Kind], found: Comparison) -> str:
    """Return one tab for all ranks and one per kind."""
    made = '<button type="button" data-report="" aria-pressed="true">all ranks</button>'
    for kind in kinds:
        odd = ' <span class="odd-mark" title="the odd one out">◂</span>' if kind in found.odd else ""
        made += (
            f'<button type="button" data-report="{kind.first.rank}" aria-pressed="false" '
            f'title="the full report of rank {kind.first.rank}">{kind.name}{odd}</button>'
        )
    return made


def ranks_section(summary: ClusterSummary, kinds: Sequence[Kind], found: Comparison) -> str:
    """Return one bar per kind, by category, on a common scale."""
    if not kinds:
        return ""
    most = max(1, *(kind.process_bytes for kind in kinds))
    capacity = summary.capacity_bytes if 0 < summary.capacity_bytes <= _NEAR * most else 0  # if near enough to draw
    levels = [("typical", found.typical.process_bytes)] if found.typical and len(found.kinds) > 1 else []
    levels += [("capacity", capacity)] if capacity else []
    scale = max(most, capacity) * 1.02
    rows = "\n".join(_rank_row(kind, summary, found, scale, table_unit(most), levels) for kind in kinds)
    left_out = len(found.kinds) - len(kinds)
    more = f'<p class="note">and {left_out:,} kinds more</p>' if left_out else ""
    lines = [f"dotted: {found.most}"] if _is_compared(found) else []
    lines += ["red: all that the card has"] if capacity else []
    note = "What each process holds at most; ranks with the same figures are one row. " + sentence(", ".join(lines))
    body = f'<div id="rank-rows" class="rank-rows">{rows}</div>{more}'
    held = {part for kind in kinds for part, size_bytes in kind.parts.items() if size_bytes}
    entries = "".join(f"<li>{markup.swatch(_colour(part))}{LABELS[part]}</li>" for part in PARTS if part in held)
    legend = f'<ul class="legend">{entries}</ul>'
    return markup.section("Ranks side by side", _verdict(summary, found), legend, body, name="ranks", note=note)


def _rank_row(
    kind: Kind, summary: ClusterSummary, found: Comparison, scale: float, unit: str, levels: Sequence[tuple[str, int]]
) -> str:
    rank, held, is_odd = kind.first.rank, kind.process_bytes, kind in found.odd
    count = f'<span class="note">× {len(kind.ranks):,}</span>' if len(kind.ranks) > 1 else ""
    badges = '<span class="badge bad">dies first</span>' if summary.dies_first in kind.ranks else ""
    if kind.verdict and not badges:
        badges = f'<span class="badge{" bad" if kind.first.outcome == "oom" else ""}">{kind.verdict}</span>'
    if is_odd:
        badges += '<span class="badge odd-mark">◂ odd one out</span>'
    elif kind is found.typical and _is_compared(found):
        badges += f'<span class="badge">{_typical_word(found)}</span>'
    over = f'<span class="over">{signed(found.over_bytes(kind), unit)}</span>' if is_odd else ""
    return (
        f'<div class="rank-row{" is-odd" if is_odd else ""}" id="rank-{rank}">'
        f'<div class="who"><button type="button" data-report="{rank}" title="the full report of rank '
        f'{rank}">{kind.name}</button>{count}{badges}</div>'
        f'<div class="bar-cell">{_bar(kind, scale, levels)}</div><div class="held">{size(held, unit)}'
        f'<span class="note">{share(held, summary.capacity_bytes)}</span>{over}</div></div>'
    )


def _is_compared(found: Comparison) -> bool:
    return found.typical is not None and len(found.kinds) > 1


def _typical_word(found: Comparison) -> str:
    return "typical" if found.most == "most ranks" else "median"


def _verdict(summary: ClusterSummary, found: Comparison) -> str:
    """Say which rank is the outlier; else what the failing rank has more, or how far the ranks are apart."""
    if found.odd:
        said = "".join(f"<p>{text(sentence(found.words_of(kind)), 600)}</p>" for kind in found.odd[:_MOST_ODD])
        plural = "s" * (len(found.odd) > 1)
        ranks = f"{found.typical.first.rank},{found.odd[0].first.rank}" if found.typical else ""
        hint = f'<p class="note">By module and by line: <code>tonnage diff FILE FILE --ranks {ranks}</code></p>'
        return f'<div id="odd" class="odd"><strong>The odd one{plural} out</strong>{said}{hint}</div>'
    if not _is_compared(found):
        return '<p id="odd">All ranks hold the same.</p>' if found.typical else ""
    dead = next((kind for kind in found.kinds if summary.dies_first in kind.ranks), found.typical)
    if dead is not found.typical and dead:
        return f'<p id="odd">{text(sentence(found.words_of(dead)), 600)}</p>'
    held = [kind.process_bytes for kind in found.kinds]
    return f'<p id="odd">No rank stands out: from the least to the most it is {size(max(held) - min(held))}.</p>'


def _bar(kind: Kind, scale: float, lines: Sequence[tuple[str, int]]) -> str:
    boxes, at = [], 0.0
    for part in PARTS:
        part_bytes = kind.parts.get(part, 0)
        width = _BAR_UNITS * part_bytes / scale
        if width:
            place = f'x="{at:.2f}" y="0" width="{width:.2f}" height="1"'
            words = f"{LABELS[part]}, {format_bytes(part_bytes)}"
            boxes.append(f'<rect class="c-{_colour(part)}" {place}><title>{words}</title></rect>')
        at += width
    for name, level in lines:
        x = f"{_BAR_UNITS * level / scale:.2f}"
        boxes.append(f'<line class="{name}" x1="{x}" x2="{x}" y1="0" y2="1"/>')
    words = f"{kind.name}: {format_bytes(kind.process_bytes)}"
    look = f'viewBox="0 0 {_BAR_UNITS} 1" preserveAspectRatio="none" role="img" aria-label="{words}"'
    return f'<svg class="rank-bar" {look}>{"".join(boxes)}</svg>'


def _colour(part: str) -> str:
    return _COLOURS.get(part, part)


def line_head(kind: Kind, summary: ClusterSummary, found: Comparison) -> dict[str, object]:
    """Return what the chart says about a line."""
    role = word = ""
    if summary.dies_first in kind.ranks:
        role, word = "dies", ", dies first"
    elif kind in found.odd:
        role, word = "odd", " ◂ odd one out"
    elif kind is found.typical and _is_compared(found):
        role, word = "typical", f", {_typical_word(found)}"
    return {"rank": kind.first.rank, "name": kind.name, "role": role, "word": word}


def categories_section(kinds: Sequence[Kind], found: Comparison) -> str:
    """Return every kind's bytes by category; for outliers, the difference from most ranks."""
    if not kinds:
        return ""
    held = [part for part in PARTS if any(kind.parts.get(part) for kind in kinds)]
    unit = table_unit(max(kind.process_bytes for kind in kinds))
    rows = []
    for kind in kinds:
        odd = ' <span class="odd-mark">◂</span>' if kind in found.odd else ""
        over, cells = found.over_typical(kind) if kind in found.odd else {}, []
        for part in held:
            extra, part_bytes = over.get(part, 0), kind.parts.get(part, 0)
            differs = f'<br><span class="over">{signed(extra, unit)}</span>'
            is_notable = abs(extra) > _NOTABLE * kind.process_bytes
            cells.append((size(part_bytes, unit) if part_bytes else "–") + differs * is_notable)
        rows.append((f"{spans_of(kind.ranks)}{odd}", *cells, size(kind.process_bytes, unit)))
    columns = ("rank", *(markup.column(_colour(part), LABELS[part]) for part in held), "sum")
    table = markup.table(columns, rows, name="category-rows", numbers=range(1, len(columns)))
    note = f"Bytes at each rank's own peak; for an odd one also what it has more or less than {found.most}."
    return markup.section("Ranks by category", table, name="categories", note=note if found.odd else "")


def engines_section(kinds: Sequence[Kind]) -> str:
    """Return what FSDP, DDP and NCCL hold; kinds that hold the same share a row."""
    alike: dict[tuple[tuple[str, int], ...], list[Kind]] = {}
    for kind in kinds:
        alike.setdefault(tuple(kind.first.held_by_engines.items()), []).append(kind)
    found = dict.fromkeys(name for held in alike for name, _ in held)
    names = sorted(found, key=lambda name: name == COMMUNICATORS)
    if not names:
        return ""
    rows = []
    for sizes, same in alike.items():
        held, ranks = dict(sizes), sorted(rank for kind in same for rank in kind.ranks)
        rows.append((spans_of(ranks), *(size(held[name]) if held.get(name) else "–" for name in names)))
    columns = ("rank", *map(text, names))
    table = markup.table(columns, rows, name="engine-rows", numbers=range(1, len(columns)))
    note = "At the rank's peak, and part of the categories above; communicators lie outside PyTorch's allocator."
    return markup.section("Held by the engines", table, name="engines", note=note)

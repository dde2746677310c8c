"""The text, bars and tables of a cluster's page; each row is a kind of ranks."""

from collections.abc import Iterator, Sequence

from tonnage.recording import ClusterSummary, Recording
from tonnage.recording.cluster import COMMUNICATORS
from tonnage.report.html import markup
from tonnage.report.html.markup import share, size, text
from tonnage.report.html.sections import SOURCES, failure, where
from tonnage.report.html.series import STACKING
from tonnage.report.lines import table_unit
from tonnage.report.odd_ranks import BEYOND, LABELS, OUTSIDE, Comparison, Kind, name_of, signed, spans_of
from tonnage.report.total import verdict_words
from tonnage.units import format_bytes

PARTS = (*map(str, STACKING), BEYOND, OUTSIDE)
_COLOURS = {BEYOND: "fragmentation", OUTSIDE: "context"}
_NEAR = 1.6  # the capacity is drawn if it is at most this many times what is held
_BAR_UNITS = 1000
_NOTABLE = 0.01
_MOST_ODD = 8


def title_of(summary: ClusterSummary) -> str:
    """Return the script, or the cluster if no script is known."""
    return " ".join((summary.script or summary.words, *summary.arguments))


# The head


def header_section(
    summary: ClusterSummary, found: Comparison, worst: Recording | None, step_words: str = "", *, climbs: bool = False
) -> str:
    """Return the run, the cluster, the verdict, the step time, and which rank decides."""
    capacity = f"{summary.capacity_bytes / 2**30:.1f} GiB each" if summary.capacity_bytes else ""
    torch = worst.header.torch_modelled.partition("+")[0] if worst else ""
    facts = [summary.words, capacity, f"torch {torch}" if torch else "", SOURCES[worst.header.source] if worst else ""]
    trouble = f'<p class="failure" id="trouble">{text(summary.trouble, 2000)}</p>' if summary.trouble else ""
    kind = "error" if climbs and summary.outcome == "ok" else summary.outcome
    step = f'<p id="step-words">{text(step_words)}</p>' if step_words else ""
    return (
        f'<header><div class="head"><h1>{text(title_of(summary))}</h1>'
        f'<span id="verdict" class="verdict {kind}">{verdict_words(summary.outcome, climbs)}</span></div>'
        f'<p id="card">{text(" · ".join(filter(None, facts)))}</p>{trouble}'
        f'<dl class="tiles">{"".join(_tiles(summary, found))}</dl>{step}{_decides(summary, found, worst)}</header>'
    )


def _tiles(summary: ClusterSummary, found: Comparison) -> Iterator[str]:
    ran, every = len(summary.ranks), summary.gpus
    how = "every one ran" if ran == every else f"{ran:,} ran and stand for all"
    if summary.outcome == "error":
        how = f"{ran:,} reported" if ran else "none reported"
    yield f'<div id="tile-ranks"><dt>ranks</dt><dd class="figure">{every:,}</dd><dd class="note">{how}</dd></div>'
    if not found.kinds:
        return
    most, least = (choose(found.kinds, key=lambda kind: kind.process_bytes) for choose in (max, min))
    if len(found.kinds) == 1:
        yield _tile("most", "each rank holds", most, summary)
        return
    yield _tile("most", "the most a rank holds", most, summary)
    if found.typical:
        verb = "hold" if found.most.endswith("s") else "holds"
        yield _tile("typical", f"{found.most} {verb}", found.typical, summary)
    yield _tile("least", "the least a rank holds", least, summary)


def _tile(name: str, title: str, kind: Kind, summary: ClusterSummary) -> str:
    held, capacity = kind.process_bytes, summary.capacity_bytes
    words = name_of(kind.ranks) + (f", {100 * held / capacity:.0f} % of the card" if capacity else "")
    return f'<div id="tile-{name}"><dt>{title}</dt><dd>{size(held)}</dd><dd class="note">{words}</dd></div>'


def _decides(summary: ClusterSummary, found: Comparison, worst: Recording | None) -> str:
    if worst is None:
        return ""
    why = "needs most" if summary.dies_first is None else "dies first"
    is_one_of_many = len(found.kinds) > 1 or summary.dies_first is not None
    who = f"<p><strong>Rank {summary.worst} {why}.</strong></p> " if is_one_of_many else ""
    return f'<div id="decides">{who}{where(worst)}{failure(worst)}</div>'


# Tabs


def tabs(kinds: Sequence[Kind], found: Comparison) -> str:
    """Return one tab for all ranks and one per kind."""
    every = '<button type="button" data-report="" aria-pressed="true">all ranks</button>'
    return every + "".join(_tab(kind, found, name_of(kind.ranks)) for kind in kinds)


def _tab(kind: Kind, found: Comparison, words: str) -> str:
    odd = ' <span class="odd-mark" title="the odd one out">◂</span>' if kind in found.odd else ""
    return (
        f'<button type="button" data-report="{kind.first.rank}" aria-pressed="false" '
        f'title="the full report of rank {kind.first.rank}">{words}{odd}</button>'
    )


# Ranks side by side


def ranks_section(summary: ClusterSummary, kinds: Sequence[Kind], found: Comparison) -> str:
    """Return one bar per kind, by category, on a common scale."""
    if not kinds:
        return ""
    most = max(1, *(kind.process_bytes for kind in kinds))
    is_near = 0 < summary.capacity_bytes <= _NEAR * most
    scale = max(most, summary.capacity_bytes if is_near else 0) * 1.02
    unit = table_unit(most)
    rows = "\n".join(_rank_row(kind, summary, found, scale, unit, is_near=is_near) for kind in kinds)
    left_out = len(found.kinds) - len(kinds)
    more = f'<p class="note">and {left_out:,} kinds more</p>' if left_out else ""
    lines = [f"dotted: {found.most}"] if _is_compared(found) else []
    lines += ["red: all that the card has"] if is_near else []
    note = f"What each process holds at most; ranks with the same figures are one row. {_sentence(', '.join(lines))}"
    body = f'<div id="rank-rows" class="rank-rows">{rows}</div>{more}'
    held = {part for kind in kinds for part, size_bytes in kind.parts.items() if size_bytes}
    entries = "".join(f"<li>{markup.swatch(_colour(part))}{LABELS[part]}</li>" for part in PARTS if part in held)
    legend = f'<ul class="legend">{entries}</ul>'
    return markup.section("Ranks side by side", _verdict(summary, found), legend, body, name="ranks", note=note)


def _is_compared(found: Comparison) -> bool:
    return found.typical is not None and len(found.kinds) > 1


def _typical_word(found: Comparison) -> str:
    return "typical" if found.most == "most ranks" else "median"


def _verdict(summary: ClusterSummary, found: Comparison) -> str:
    """Say which rank is the outlier; else what the failing rank has more, or how far the ranks are apart."""
    if found.odd:
        said = "".join(f"<p>{text(_sentence(found.words_of(kind)), 600)}</p>" for kind in found.odd[:_MOST_ODD])
        plural = "s" * (len(found.odd) > 1)
        ranks = f"{found.typical.first.rank},{found.odd[0].first.rank}" if found.typical else ""
        hint = f'<p class="note">By module and by line: <code>tonnage diff FILE FILE --ranks {ranks}</code></p>'
        return f'<div id="odd" class="odd"><strong>The odd one{plural} out</strong>{said}{hint}</div>'
    if not _is_compared(found):
        return '<p id="odd">All ranks hold the same.</p>' if found.typical else ""
    dead = next((kind for kind in found.kinds if summary.dies_first in kind.ranks), found.typical)
    if dead is not found.typical and dead:
        return f'<p id="odd">{text(_sentence(found.words_of(dead)), 600)}</p>'
    held = [kind.process_bytes for kind in found.kinds]
    return f'<p id="odd">No rank stands out: from the least to the most it is {size(max(held) - min(held))}.</p>'


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _rank_row(kind: Kind, summary: ClusterSummary, found: Comparison, scale: float, unit: str, *, is_near: bool) -> str:
    is_odd = kind in found.odd
    count = f'<span class="note">× {len(kind.ranks):,}</span>' if len(kind.ranks) > 1 else ""
    of_card = share(kind.process_bytes, summary.capacity_bytes)
    lines = [("typical", found.typical.process_bytes)] if found.typical and len(found.kinds) > 1 else []
    lines += [("capacity", summary.capacity_bytes)] if is_near else []
    over = f'<span class="over">{signed(found.over_bytes(kind), unit)}</span>' if is_odd else ""
    return (
        f'<div class="rank-row{" is-odd" if is_odd else ""}" id="rank-{kind.first.rank}">'
        f'<div class="who"><button type="button" data-report="{kind.first.rank}" title="the full report of rank '
        f'{kind.first.rank}">{name_of(kind.ranks)}</button>{count}{"".join(_badges(kind, summary, found))}</div>'
        f'<div class="bar-cell">{_bar(kind, scale, lines)}</div>'
        f'<div class="held">{size(kind.process_bytes, unit)}<span class="note">{of_card}</span>{over}</div></div>'
    )


def _badges(kind: Kind, summary: ClusterSummary, found: Comparison) -> Iterator[str]:
    if summary.dies_first in kind.ranks:
        yield '<span class="badge bad">dies first</span>'
    elif kind.verdict:
        yield f'<span class="badge{" bad" if kind.first.outcome == "oom" else ""}">{kind.verdict}</span>'
    if kind in found.odd:
        yield '<span class="badge odd-mark">◂ odd one out</span>'
    elif kind is found.typical and _is_compared(found):
        yield f'<span class="badge">{_typical_word(found)}</span>'


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
    words = f"{name_of(kind.ranks)}: {format_bytes(kind.process_bytes)}"
    look = f'viewBox="0 0 {_BAR_UNITS} 1" preserveAspectRatio="none" role="img" aria-label="{words}"'
    return f'<svg class="rank-bar" {look}>{"".join(boxes)}</svg>'


def _colour(part: str) -> str:
    return _COLOURS.get(part, part)


# Over the run


def line_head(kind: Kind, summary: ClusterSummary, found: Comparison) -> dict[str, object]:
    """Return what the chart says about a line."""
    role = word = ""
    if summary.dies_first in kind.ranks:
        role, word = "dies", ", dies first"
    elif kind in found.odd:
        role, word = "odd", " ◂ odd one out"
    elif kind is found.typical and _is_compared(found):
        role, word = "typical", f", {_typical_word(found)}"
    return {"rank": kind.first.rank, "name": name_of(kind.ranks), "role": role, "word": word}


# Tables


def categories_section(kinds: Sequence[Kind], found: Comparison) -> str:
    """Return every kind's bytes by category; for outliers, the difference from most ranks."""
    if not kinds:
        return ""
    held = [part for part in PARTS if any(kind.parts.get(part) for kind in kinds)]
    unit = table_unit(max(kind.process_bytes for kind in kinds))
    rows = []
    for kind in kinds:
        odd = ' <span class="odd-mark">◂</span>' if kind in found.odd else ""
        who, cells = f"{spans_of(kind.ranks)}{odd}", _cells(kind, found, held, unit)
        rows.append((who, *cells, size(kind.process_bytes, unit)))
    columns = ("rank", *(markup.column(_colour(part), LABELS[part]) for part in held), "sum")
    table = markup.table(columns, rows, name="category-rows", numbers=range(1, len(columns)))
    note = f"Bytes at each rank's own peak; for an odd one also what it has more or less than {found.most}."
    return markup.section("Ranks by category", table, name="categories", note=note if found.odd else "")


def _cells(kind: Kind, found: Comparison, held: Sequence[str], unit: str) -> Iterator[str]:
    over = found.over_typical(kind) if kind in found.odd else {}
    notable = _NOTABLE * kind.process_bytes
    for part in held:
        extra = over.get(part, 0)
        differs = f'<br><span class="over">{signed(extra, unit)}</span>' if abs(extra) > notable else ""
        part_bytes = kind.parts.get(part, 0)
        yield (size(part_bytes, unit) if part_bytes else "–") + differs


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

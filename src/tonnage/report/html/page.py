"""A recording as one HTML page that works offline: template, style, script and data in one file.

Charts are drawn by our own script of a few hundred lines: a plotting library adds megabytes to every page, draws each
event as a shape, and does not follow light or dark mode. The page allows only that script and style (by hash), so
nothing in a recording can run or fetch anything.
"""

from contextlib import suppress
from dataclasses import asdict
from string import Template

from tonnage import __version__
from tonnage.allocator import AllocatorSettings, BadAllocatorSettings
from tonnage.explain import Advice, Diagnosis, Outlook
from tonnage.explain.diagnosis import outlook_of
from tonnage.explain.total import AllCards
from tonnage.recording import Recording
from tonnage.recording.beyond import moment_of_failure, until_failure
from tonnage.recording.records import Header
from tonnage.recording.writes import writes_sentence
from tonnage.report.html import markup
from tonnage.report.html.host import host_section
from tonnage.report.html.markup import bar, embedded, policy, read_parts, share, size, text
from tonnage.report.html.segments import segments_section
from tonnage.report.html.series import STRETCHES, packed_blocks, series_of
from tonnage.report.html.step import step_section
from tonnage.report.lines import picked, table_unit
from tonnage.report.runs.total import caveat_words, larger_card_words, place_words, total_words, verdict_words
from tonnage.units import percent

STYLES = ("page.css", "step.css")  # a cluster's page has more
SCRIPTS = ("common.js", "drawing.js", "timeline.js", "blocks.js", "controls.js", "moment.js", "icicle.js", "step.js")
SOURCES = {"virtual": "predicted on a virtual GPU", "cuda": "measured", "snapshot": "measured, from a PyTorch snapshot"}
MOST_ROWS = 200
_RESCUES = {True: "✓", False: "✗", None: ""}
_FIXES = 4
_NAMES = {
    "none": "nothing is wrong",
    "pinned-host": "pinned host memory",
    "host-memory": "memory of the host",
    "unbounded-cache": "a cache without a bound",
}


def render_page(
    recording: Recording,
    advice: Advice | None = None,
    *,
    diagnosis: Diagnosis | None = None,
    stretches: int = STRETCHES,
    cards: AllCards | None = None,
) -> str:
    """Return the page; for a long run the chart keeps the extremes of this many stretches."""
    style, script, shown = read_parts(*STYLES), read_parts(*SCRIPTS), until_failure(recording)
    named = advice or Advice()
    ahead = named.outlook
    # A diagnosis has its own section for its sentence and the outlook, except that memory climbs.
    if diagnosis:
        named = Advice(diagnosis.fixes, diagnosis.larger_card, total=diagnosis.total)
        ahead = Outlook(climb=outlook_of(recording).climb)
    # The request that failed, if it is in the chart.
    moment, oom, failed = moment_of_failure(recording), recording.oom, None
    if moment is not None and oom is not None:
        failed = {"event": moment} | picked(oom, "asked:requested_bytes free:free_bytes reserved:reserved_bytes")
    return Template(read_parts("page.html")).substitute(
        policy=policy([style], [script]),
        title=text(title_of(recording)),
        style=style,
        header=header_section(recording, ahead),
        cause=cause_section(diagnosis) if diagnosis else "",
        advice=advice_section(recording, named) + (all_cards_section(cards) if cards else ""),
        step_time=step_section(recording.step_time),
        ledger=ledger_section(recording),
        outside=outside_section(recording),
        segments=segments_section(shown),
        course=course_section(shown),
        host=host_section(recording),
        settings=settings_section(recording),
        basis=basis_section(recording),
        data=embedded({"timeline": series_of(shown, stretches), "failure": failed}),
        blocks=packed_blocks(shown),
        script=script,
    )


def title_of(recording: Recording) -> str:
    """Return the script, or the GPU if no script is known."""
    header = recording.header
    return " ".join((header.program or header.gpu_name, *header.arguments))


def header_section(recording: Recording, ahead: Outlook) -> str:
    """Return the run, the GPU, the verdict, the peaks and the outlook."""
    header, unused = recording.header, recording.unused_at_peak_bytes
    process, capacity = recording.peak_process_bytes, header.capacity_bytes
    of_card = f"{percent(process / capacity, 0)} of the card" if capacity else "with what is beside PyTorch"
    tiles = [
        ("allocated", recording.peak_allocated_bytes, "in tensors, at most"),
        ("reserved", recording.peak_reserved_bytes, "held by PyTorch, at most"),
        ("process", process, of_card),
        ("unused", unused, f"{share(unused, recording.peak_reserved_bytes) or '0 %'}, when most was reserved"),
    ]
    peaks = "".join(markup.tile(name, size(part), words, name=f"peak-{name}") for name, part, words in tiles)
    said = "".join(f'<p class="outlook">{text(line, 1000)}</p>' for line in ahead.lines)
    facts = run_facts(header.gpu_name, f"{capacity / 2**30:.1f} GiB" if capacity else "", header)
    return markup.head(
        text(title_of(recording)),
        *verdict_pill(header.outcome, ahead.climb is not None),
        facts,
        f'<dl class="tiles">{peaks}</dl>{where(recording)}{said}{failure(recording)}',
    )


def run_facts(who: str, capacity: str, header: Header | None) -> str:
    """Return what ran and how as far as it is known: a snapshot does not have all."""
    torch = header.torch_modelled.partition("+")[0] if header else ""
    facts = [who, capacity, f"torch {torch}" if torch else "", SOURCES[header.source] if header else ""]
    return text(" · ".join(filter(None, facts)))


def verdict_pill(outcome: str, climbs: bool) -> tuple[str, str]:
    """Return the verdict and its kind."""
    return verdict_words(outcome, climbs), "error" if climbs and outcome == "ok" else outcome


def where(recording: Recording) -> str:
    """Say where in the run the peak is."""
    at = recording.peak_allocation
    if at is None:
        return '<p id="where">Nothing was allocated on the GPU.</p>'
    places = [f"step {at.step}" if at.step else "", at.phase, at.module, at.operator.removeprefix("aten::")]
    words = ", ".join(filter(None, places)) or "before any step"
    line = f' at <span class="line">{text(at.line)}</span>' if at.line else ""
    return f'<p id="where">The peak is in {text(words)}{line}.</p>'


def failure(recording: Recording) -> str:
    """Return what ended the run early, if anything."""
    oom, header = recording.oom, recording.header
    if recording.dependence is not None:
        words = f"{recording.dependence.sentence}. {recording.dependence.advice}"
        return f'<p class="failure">{text(words, 2000)}</p>'
    if oom is None:
        return f'<p class="failure">{text(header.error, 2000)}</p>' if header.error else ""
    maker = ", ".join(filter(None, (oom.operator.removeprefix("aten::"), oom.module)))
    by = f" by {text(maker)}" if maker else ""
    message = f"<details><summary>what PyTorch said</summary>{text(oom.message, 4000)}</details>" if oom.message else ""
    return (
        f'<div class="failure" id="oom"><strong>Out of memory at <span class="line">{text(oom.line) or "a line unknown"}'
        f"</span></strong>: {size(oom.requested_bytes)} asked for{by}, {size(oom.free_bytes)} free. PyTorch held "
        f"{size(oom.reserved_bytes)}, of it {size(oom.allocated_bytes)} in tensors.{message}</div>"
    )


def ledger_section(recording: Recording) -> str:
    """Return bytes by category at the peak."""
    ledger = recording.ledger()
    total = ledger.total_bytes
    rows = markup.ledger([(str(c), c.label, part) for c, part in ledger.ranked()], total)
    rows.append(("sum", size(total, table_unit(total)), "", ""))
    known = "measured" if ledger.measured else "predicted"
    body = markup.table(("", "", "", ""), rows, name="ledger-rows", numbers=(1, 2))
    return markup.section("The peak by category", body, name="ledger", note=f"{known}; exact sums of blocks")


def outside_section(recording: Recording) -> str:
    """Return the whole card: what PyTorch holds, what lies outside it, what is free."""
    header = recording.header
    allocated = min(recording.peak_allocated_bytes, recording.peak_reserved_bytes)
    outside = list(header.overhead_parts.items())[:MOST_ROWS]
    rest = header.overhead_bytes - sum(size_bytes for _, size_bytes in outside)
    outside += [("other", rest)] if rest > 0 else []
    rows = [
        ("tensors", "tensors", allocated),
        ("fragmentation", "reserved beyond them", recording.peak_reserved_bytes - allocated),
        *(("context", f"outside PyTorch: {part}", size_bytes) for part, size_bytes in outside),
    ]
    held = sum(size_bytes for _, _, size_bytes in rows)
    if header.capacity_bytes >= held:
        rows.append(("free", "free", header.capacity_bytes - held))
    whole = max(header.capacity_bytes, held)
    cells = markup.ledger(rows, whole, bars=False)
    if header.pinned_host_bytes:
        pinned = size(header.pinned_host_bytes, table_unit(whole))
        cells.append(("pinned memory of the host", pinned, "not on the card"))
    filled = bar([(kind, part) for kind, _, part in rows if part > 0], whole)
    body = markup.table(("", "", ""), cells, name="outside-rows", numbers=(1, 2))
    note = "" if header.overhead_bytes else "What the process held outside PyTorch was not recorded."
    return markup.section("The card", filled, body, name="outside", note=note)


def course_section(recording: Recording) -> str:
    """Return the peak of each phase and of each step."""
    peak = recording.peak_allocated_bytes
    unit = table_unit(peak)
    phases = [(text(p.name), size(p.peak_allocated_bytes, unit)) for p in recording.phases[:MOST_ROWS]]
    parts = [markup.table(("", ""), phases, name="phase-rows", numbers=(1,))]
    if len(recording.steps) > 1:
        steps, more = [], len(recording.steps[MOST_ROWS:])
        for step in recording.steps[:MOST_ROWS]:
            name, held = f"step {step.step}" if step.step else "before any step", step.peak_allocated_bytes
            steps.append((name, size(held, unit), bar([("activations", held)], peak)))
        rest = f'<p class="note">and {more:,} more steps</p>' if more else ""
        table = markup.table(("", "", ""), steps, name="step-rows", numbers=(1,))
        parts.append(f'<div class="tall" tabindex="0">{table}{rest}</div>')
    return markup.section("Peaks by phase and step", f'<div class="pair">{"".join(parts)}</div>', name="course")


def advice_section(recording: Recording, advice: Advice, *, of: str = "") -> str:
    """Return memory-saving changes, most first; `of` names whose memory, if there are several."""
    if not advice.fixes and not advice.larger_card and not advice.total:
        return ""
    died = recording.header.outcome == "oom"
    rows = []
    for fix in advice.fixes[:MOST_ROWS]:
        how = f"<code>{text(fix.how, 1000)}</code>" + (' <span class="note">run, not computed</span>' * fix.was_run)
        saves = size(fix.saves_bytes) if fix.saves_bytes else "–"
        rows.append((_RESCUES[fix.rescues], text(fix.change), saves, text(fix.costs), how))
    parts = [f"<p>{text(advice.why, 2000)}</p>"] if advice.why else []
    if advice.total:
        words = total_words(recording, advice)
        parts.append(f'<p id="total"><strong>It {text(words)}.</strong> {text(caveat_words(advice.total), 1000)}</p>')
    columns = ("", "change", "saves", "costs", "how")
    parts += [markup.folded(rows, _FIXES, columns, name="fixes", numbers=(2,), kind="fixes")] if rows else []
    if died and advice.larger_card:
        words = larger_card_words(recording, advice.larger_card)
        parts.append(f"<p>{text(words[:1].upper() + words[1:])}.</p>")
    what = "the whole run fits with it" if recording.whole else "it gets past the line that died"
    note = f"✓: {what}. ✗: it does not." if died else ""
    return markup.section(f"What to do for {of}" if of else "What to do", *parts, name="advice", note=note)


def all_cards_section(cards: AllCards) -> str:
    """Return which GPUs of the catalogue hold the run."""
    rows = []
    for row in cards.rows():
        first = row[0]
        died = ("✗", text(f"dies in {place_words(first)}"))
        end = ("✓", f"{size(first.left_bytes, 'GiB')} left") if first.oom is None else died
        sizes = (size(first.gpu.memory_bytes, "GiB"), size(first.process_bytes, "GiB"))
        rows.append((text(", ".join(a.gpu.key for a in row)), *sizes, *end))
    body = markup.table(("cards", "memory", "it takes", "", ""), rows, name="card-rows", numbers=(1, 2))
    note = f"It needs {size(cards.needed_bytes)} in all."
    return markup.section("Which cards hold it", body, name="cards", note=note)


def settings_section(recording: Recording) -> str:
    """Return the allocator's settings: those given, and their meaning beside PyTorch's defaults."""
    given, rows = recording.header.settings, []
    with suppress(BadAllocatorSettings):
        settings, own = asdict(AllocatorSettings.parse(given)), asdict(AllocatorSettings())
        changed = [name for name in own if settings[name] != own[name] and name != "text"]
        rows = [(text(name), text(str(settings[name])), text(str(own[name]))) for name in changed]
    words = f"<code>PYTORCH_ALLOC_CONF={text(given, 1000)}</code>" if given else "PyTorch's defaults: none was set."
    said = f'<p id="settings-text">{words}</p>'
    table = markup.table(("setting", "here", "PyTorch's own"), rows, name="settings-rows")
    return markup.section("The allocator's settings", said, *[table] * bool(rows), name="settings")


def basis_section(recording: Recording) -> str:
    """Return what the figures are based on: versions, substituted values, assumptions."""
    header = recording.header
    facts = [
        ("tonnage", __version__),
        ("torch modelled", header.torch_modelled),
        ("torch installed", header.torch_installed),
        ("events", f"{len(recording.timeline.allocated_bytes):,}"),
        ("wall time", f"{header.wall_seconds:.1f} s" if header.wall_seconds else ""),
        ("out of memory, caught by the script", f"{header.ooms_caught:,} times" if header.ooms_caught else ""),
    ]
    rows = [(name, text(words)) for name, words in facts if words]
    for note in recording.notes[:MOST_ROWS]:
        kind = "not modelled" if note.kind == "not_modelled" else "assumed"
        rows.append((kind, f"{text(note.operator)} ×{note.count:,}: {text(note.text, 1000)}"))
    for s in recording.stand_ins[:MOST_ROWS]:
        words = f"{text(s.what)} ×{s.count:,}, {text(s.line)}: {text(s.value)}"
        rows.append(("read from the virtual GPU", words))
    if recording.writes and recording.writes.files:
        rows.append(("files", text(writes_sentence(recording.writes, folder=header.folder), 1000)))
    body = markup.table(("", ""), rows, name="basis-rows")
    return markup.section("What this rests on", body, name="basis")


def cause_section(diagnosis: Diagnosis) -> str:
    """Return the cause in a sentence, followed by the findings."""
    name = _NAMES.get(diagnosis.cause, diagnosis.cause.replace("-", " "))
    kind = "ok" if diagnosis.cause == "none" else "oom"
    said = f'<p><strong class="cause {kind}">{text(name)}</strong> {text(diagnosis.sentence, 2000)}</p>'
    findings = []
    for finding in diagnosis.evidence:
        lines = "".join(
            f'<tr><td class="n">{size(g.size_bytes)}</td><td class="line">{text(g.line) or "no line known"}</td>'
            f"<td>{f'{g.count:,} × ' if g.count > 1 else ''}{text(g.what)}</td></tr>"
            for g in finding.lines
        )
        # A sentence that is already shown as the cause is replaced by its rule.
        words = finding.rule if finding.sentence in diagnosis.sentence else finding.sentence
        where = f'<table class="guilty"><tbody>{lines}</tbody></table>' if lines else ""
        findings.append(f"<dt>{size(finding.size_bytes)}</dt><dd>{text(words, 2000)}{where}</dd>")
    evidence = f'<dl class="evidence">{"".join(findings)}</dl>' if findings else ""
    return markup.section("Why", said, evidence, name="cause")

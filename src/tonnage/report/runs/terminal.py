"""The report of a run as text and as JSON values: the memory it takes, what it is used for, and what to do."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, TextIO

from rich.text import Text

from tonnage import __version__
from tonnage.explain import Advice, Outlook
from tonnage.explain.case import is_limited_by_itself
from tonnage.explain.total import AllCards
from tonnage.ledger import Category
from tonnage.recording import Allocation, FailedRequest, Recording, telling_lines
from tonnage.recording.records import Dependence
from tonnage.recording.timeline import name_at
from tonnage.recording.writes import ScriptWrites, path_in, writes_sentence
from tonnage.report.lines import (
    column,
    cut,
    heading,
    ledger_row,
    packed,
    picked,
    print_sections,
    report_width,
    said,
    spread,
    table,
    table_unit,
    wrapped,
)
from tonnage.report.runs.host import host_figures, host_lines
from tonnage.report.runs.total import all_cards_sections, fix_lines, larger_card_words, total_lines, verdict_words
from tonnage.report.step_time import NONE, Campaign, time_figures, time_lines, time_words
from tonnage.script.notebook import source_line
from tonnage.units import GIB, format_bytes, percent
from tonnage.untrusted import clipped

_LARGEST = 5
_LARGEST_IN_JSON = 20
_FIXES = 4
_STEPS = 6
_LONGEST_REASON = 320  # characters
_WORTH_SAYING = 0.01
# Phases that are not mentioned beside the others.
_BESIDE = ("setup", "other", "data")
_STYLES = {"ok": "bold green", "oom": "bold red", "error": "bold yellow", "depends": "bold yellow"}


def print_report(
    answers: Sequence[Recording],
    ran: Recording,
    advice: Advice,
    *,
    stream: TextIO,
    verbose: bool,
    campaign: Campaign = NONE,
    cards: AllCards | None = None,
) -> None:
    """Print a table of all GPUs if there are several, then the GPU that ran in full."""
    several = [cards_table(answers, climbs=bool(advice.outlook.climb))] if len(answers) > 1 else []
    several += all_cards_sections(cards) if cards else []
    print_sections([*several, *report_sections(ran, advice, verbose=verbose, campaign=campaign)], stream)


def report_sections(
    recording: Recording, advice: Advice, *, verbose: bool, campaign: Campaign | None = None
) -> list[Iterable[Text]]:
    """Return the sections of one GPU's report, in order; without a campaign, times are omitted."""
    # The changes that save most; for a failed run, whether all of it fits with each.
    died = recording.header.outcome == "oom"
    title = "what would save it" if died else "to save memory"
    changes = [*said(advice.why), *fix_lines(title, advice.fixes[:_FIXES])]
    if died and not is_limited_by_itself(recording):
        changes.append(Text(f"  {larger_card_words(recording, advice.larger_card)}"))
    return [
        headline(recording, advice.outlook),
        iter(()) if campaign is None else time_lines(recording, campaign),
        failure(recording),
        out_of_memory(recording),
        total_lines(recording, advice, alone=campaign is not None),
        ledger(recording),
        course(recording, verbose),
        largest(recording),
        host_lines(recording, verbose=verbose),
        changes,
        write_lines(recording.writes, recording.header.folder, verbose=verbose),
        footnotes(recording, verbose),
    ]


def headline(recording: Recording, ahead: Outlook) -> Iterator[Text]:
    """Yield the GPU, the verdict, the peaks, where the peak is, and the outlook."""
    header = recording.header
    # GPU, version and source as far as they are known: a snapshot does not have all.
    size = f", {header.capacity_bytes / GIB:.1f} GiB" if header.capacity_bytes else ""
    torch = header.torch_modelled.partition("+")[0]
    card = " · ".join(filter(None, [f"{header.gpu_name}{size}", f"torch {torch}" if torch else "", header.source]))
    yield from spread(Text(f"  {card}", style="bold"), Text(*_verdict(recording, bool(ahead.climb))))
    process = recording.peak_process_bytes
    share = f" ({percent(process / header.capacity_bytes, 0)})" if header.capacity_bytes else ""
    allocated, reserved = map(format_bytes, (recording.peak_allocated_bytes, recording.peak_reserved_bytes))
    sizes = (f"allocated {allocated}", f"reserved {reserved}", f"process {format_bytes(process)}{share}")
    yield from map(Text, packed(sizes))
    if at := recording.peak_allocation:
        yield from _place_lines(recording, "peak", at)
    style = "bold yellow" if ahead.climb else "yellow"
    yield from (line for words in ahead.lines for line in said(words, style, rest="    "))


def _verdict(recording: Recording, climbs: bool) -> tuple[str, str]:
    outcome = recording.header.outcome
    return verdict_words(outcome, climbs), "bold yellow" if climbs and outcome == "ok" else _STYLES[outcome]


def failure(recording: Recording) -> Iterator[Text]:
    """Yield why the script failed, if not for lack of memory."""
    header, dependence = recording.header, recording.dependence
    if dependence is not None:
        yield from said(clipped(dependence.sentence, _LONGEST_REASON), "yellow", rest="    ")
        yield from said(clipped(dependence.advice, _LONGEST_REASON), rest="    ")
        yield Text("  the figures are of what ran until then", style="dim")
    if header.outcome == "error" and header.error:
        yield from said(f"failed: {clipped(header.error.splitlines()[0], _LONGEST_REASON)}", "yellow")
        yield Text("  the figures are of what ran until then", style="dim")


def out_of_memory(recording: Recording) -> Iterator[Text]:
    """Yield the line that failed, what it requested and what was free."""
    oom = recording.oom
    if oom is None:
        return
    yield from _place_lines(recording, "out of memory", oom, "red")
    maker = " of ".join(filter(None, [oom.operator.removeprefix("aten::"), oom.module]))
    short = format_bytes(max(0, oom.requested_bytes - oom.free_bytes))
    asked = f"asked for {format_bytes(oom.requested_bytes)}, free {format_bytes(oom.free_bytes)}: {short} short"
    yield from said(f"{asked}{f', in {maker}' if maker else ''}")
    unused, reserved = oom.reserved_bytes - oom.allocated_bytes, oom.reserved_bytes
    if unused > _WORTH_SAYING * reserved:
        yield from said(f"{format_bytes(unused)} of the {format_bytes(reserved)} reserved lay unused in pieces")


def ledger(recording: Recording) -> Iterator[Text]:
    """Yield bytes by category at the peak."""
    found = recording.ledger()
    total = found.total_bytes
    if not total:
        yield Text("  nothing was allocated on the GPU", style="yellow")
    for category, size in found.ranked() if total else ():
        amount = f"{column(size, table_unit(total))}  "
        yield ledger_row(category.label, amount, size / total, width=17, cells=28, style="cyan")


def course(recording: Recording, verbose: bool) -> Iterator[Text]:
    """Yield the peak of each phase and step, and what was unused when most was reserved."""
    if not recording.peak_allocated_bytes:
        return
    unit = table_unit(recording.peak_allocated_bytes)
    named = [phase for phase in recording.phases if phase.name not in _BESIDE] or recording.phases
    highest = max(phase.peak_allocated_bytes for phase in recording.phases)
    named += [p for p in recording.phases if p.name == "data" and p.peak_allocated_bytes == highest and p not in named]
    phases = [f"{p.name} {format_bytes(p.peak_allocated_bytes, unit)}" for p in named]
    # "steps 2–20 1.34 GiB": neighbours with equal peaks together.
    steps = []
    peaks = [(step.step, format_bytes(step.peak_allocated_bytes, unit)) for step in recording.steps if step.step]
    for peak, alike in groupby(peaks, key=lambda step: step[1]):
        numbers = [number for number, _ in alike]
        name = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}–{numbers[-1]}"
        steps.append(f"{name} {peak}")
    shown = steps if verbose else steps[:_STEPS]
    yield from (Text(line) for entries in (phases, shown) for line in packed(entries, first="  peak of   "))
    if len(shown) < len(steps):
        yield Text(f"            and {len(steps) - len(shown)} more: --verbose", style="dim")
    unused, reserved = recording.unused_at_peak_bytes, recording.peak_reserved_bytes
    if reserved:
        # At the peak of reserved bytes, which may differ from that of allocated ones.
        moment = recording.reserved_peak_sequence or 0
        step, phase = (name_at(recording.marks, kind, moment) for kind in ("step", "phase"))
        of, allocated = format_bytes(reserved, unit), format_bytes(reserved - unused, unit)
        words = f"{format_bytes(unused, unit)} of the {of} reserved ({percent(unused / reserved)})"
        words += f", {_where(int(step or 0), phase)}, when {allocated} were allocated"
        yield from said(words, first="  unused    ")


def largest(recording: Recording) -> Iterator[Text]:
    """Yield the largest tensors at the peak, merging similar ones."""
    groups, unit, rows = recording.largest(_LARGEST), table_unit(recording.peak_allocated_bytes), []
    if not groups:
        return
    yield heading("largest at the peak")
    for group, line in zip(groups, telling_lines((group.line, group.stack) for group in groups), strict=True):
        module = group.module or ("" if group.category is Category.ACTIVATIONS else group.category.label)
        operator = group.operator.removeprefix("aten::")
        rows.append((column(group.total_bytes, unit).strip(), group.what, operator, module, line))
    beside = table(rows, align="><<<<", names=(2, 3), gap=" ")
    if max(map(len, beside)) <= report_width():
        yield from map(Text, beside)
        return
    # Too long for one line: what it is, then where it was made.
    sizes = max(len(size) for size, *_ in rows)
    room = report_width() - sizes - 3
    for size, what, operator, module, line in rows:
        yield Text(f"  {size:>{sizes}} {cut(f'{what}  {operator}', room)}")
        yield Text(" " * (sizes + 3) + cut(f"{module}  ".lstrip() + line, room))


def footnotes(recording: Recording, verbose: bool) -> Iterator[Text]:
    """Yield what the figures are based on: substituted values, assumptions, and what is not modelled."""
    stand_ins, caught = recording.stand_ins, recording.header.ooms_caught
    if stand_ins:
        total = sum(stand_in.count for stand_in in stand_ins)
        words = f"{total} {'value was' if total == 1 else 'values were'} read from the virtual GPU"
        deciding = [each for each in stand_ins if each.decides]
        if deciding:
            words += f", {sum(each.count for each in deciding)} of them decided what runs"
        first = f"{stand_ins[0].what} ×{stand_ins[0].count}{', …' if len(stand_ins) > 1 else ''}"
        rows = [(f"×{each.count}", each.what, each.line, each.value, each.decides) for each in stand_ins]
        if verbose:
            yield Text(f"  {words}", style="dim")
            yield from (Text(row, style="dim") for row in table(rows, align="<<<<<", names=(1, 2, 3, 4), first="   "))
        else:
            yield from said(f"{words} ({first}): --verbose", "dim", rest="    ")
    for note in recording.notes:
        kind, style = ("not modelled", "yellow") if note.kind == "not_modelled" else ("assumed", "dim")
        times = f" ×{note.count}" if note.count > 1 else ""
        yield from said(f"{kind}: {note.operator}{times}: {note.text}", style, rest="    ")
    if recording.header.pinned_host_bytes:
        yield Text(f"  pinned host memory {format_bytes(recording.header.pinned_host_bytes)}", style="dim")
    if caught:
        times = "once" if caught == 1 else f"{caught} times"
        words = f"it ran out of memory {times}; the script caught that and went on"
        yield from said(words, "yellow", rest="    ")


def write_lines(writes: ScriptWrites | None, folder: str, *, verbose: bool = False) -> Iterator[Text]:
    """Yield what the script wrote, and what became of it."""
    if writes is None or not (writes.files or writes.fate == "in place"):
        return
    style = "yellow" if writes.fate == "in place" else ""
    yield from said(writes_sentence(writes, folder=folder), style, rest="    ")
    if not verbose:
        return
    rows = [(format_bytes(file.size_bytes), file.change, path_in(folder, file.path)) for file in writes.files]
    yield from map(Text, table(rows, align="><<", names=(2,), first="   "))


def cards_table(answers: Sequence[Recording], *, climbs: bool = False) -> Iterator[Text]:
    """Yield one run on several GPUs."""
    cells: list[tuple[str, ...]] = [("card", "memory", "allocated", "reserved", "process", "step", "verdict")]
    for answer in answers:
        peaks = (answer.peak_allocated_bytes, answer.peak_reserved_bytes, answer.peak_process_bytes)
        sizes = (format_bytes(size, "GiB") for size in (answer.header.capacity_bytes, *peaks))
        verdict = (answer.oom.line or "dies") if answer.oom else _verdict(answer, climbs)[0]
        time = time_words(answer.step_time.step_s) if answer.step_time else ""
        cells.append((answer.header.gpu, *sizes, time, verdict))
    head, *rows = table(cells, align="<>>>>><", names=(6,), spare=(1, 2))
    yield Text(head.removesuffix("verdict").rstrip(), style="bold")
    for answer, row in zip(answers, rows, strict=True):
        text, (_, style) = Text(row), _verdict(answer, climbs)
        text.stylize(style, start=row.rindex("  ") + 2)
        yield text
    if any(answer.oom for answer in answers):
        yield Text("  a card that cannot hold it shows the line that dies there", style="dim")


def _where(step: int, phase: str) -> str:
    places = ", ".join(filter(None, [f"step {step}" if step else "", phase]))
    return f"in {places}" if places else "before any step"


def _place_lines(recording: Recording, what: str, at: Allocation | FailedRequest, style: str = "") -> Iterator[Text]:
    """Yield "peak in step 2, backward, at train.py:88  loss.backward()"; below it the library's line that it led to."""
    words = f"{what} {_where(at.step, at.phase)}" + (f", at {at.line}" if at.line else "")
    *lines, last = wrapped(words)
    source = source_line(recording.header.script, at.line) if at.line else ""
    if source and len(last) + 2 + len(source) <= report_width():
        last, source = f"{last}  {source}", ""
    yield from (Text(line, style=style) for line in (*lines, last))
    if source:
        yield Text("    " + cut(source, report_width() - 4), style=style)
    if at.stack and at.stack[0] != at.line:
        yield Text("  inside " + cut(at.stack[0], report_width() - 9), style="dim")


def dependence_figures(dependence: Dependence | None) -> dict[str, Any] | None:
    """Return the values of what a run depended on, and what to do."""
    if dependence is None:
        return None
    return {**asdict(dependence), "assume": dependence.assumption, "advice": dependence.advice}


def figures_of(answers: Sequence[Recording], advice: Sequence[Advice], campaign: Campaign = NONE) -> dict[str, object]:
    """Return the values of the first GPU; with several GPUs, each one's are in `cards`."""
    each = [card_figures(answer, found, campaign) for answer, found in zip(answers, advice, strict=True)]
    return each[0] | {"cards": each} if len(each) > 1 else each[0]


def card_figures(recording: Recording, advice: Advice, campaign: Campaign = NONE) -> dict[str, Any]:
    """Return what one GPU would see. Every size is in bytes, and its key says so."""
    at, header = recording.peak_allocation, asdict(recording.header)
    notes = [asdict(note) for note in recording.notes]
    return {
        "tonnage": __version__,
        "outcome": header.pop("outcome"),
        "gpu": header.pop("gpu_name"),
        "gpu_key": header.pop("gpu"),
        **header,
        "fits": recording.fits,
        "verdict": verdict_words(recording.header.outcome, advice.outlook.climb is not None),
        "climbs": asdict(advice.outlook.climb) if advice.outlook.climb else None,
        "outlook": list(advice.outlook.lines),
        **picked(recording, "peak_allocated_bytes peak_reserved_bytes peak_process_bytes unused_at_peak_bytes"),
        **time_figures(recording, campaign),
        "ledger": {str(category): size for category, size in recording.ledger().bytes_by_category.items()},
        "peak": picked(at, "step phase line stack module operator") if at else None,
        "phases": {phase.name: phase.peak_allocated_bytes for phase in recording.phases},
        "steps": [asdict(step) for step in recording.steps],
        "largest": [asdict(group) | {"category": str(group.category)} for group in recording.largest(_LARGEST_IN_JSON)],
        "host": host_figures(recording.host),
        "oom": asdict(recording.oom) if recording.oom else None,
        "depends_on": dependence_figures(recording.dependence),
        "fixes": [asdict(fix) for fix in advice.fixes],
        "larger_card": advice.larger_card,
        "total": asdict(advice.total) if advice.total else None,
        "writes": asdict(recording.writes) if recording.writes else None,
        "stand_ins": [asdict(stand_in) for stand_in in recording.stand_ins],
        "not_modelled": [note for note in notes if note["kind"] == "not_modelled"],
        "assumptions": [note for note in notes if note["kind"] == "assumption"],
    }

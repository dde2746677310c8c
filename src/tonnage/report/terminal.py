"""The report of a run for people, in 80 columns: what it takes, where it went, and what to do.

One function a section; each turns a recording into lines. Nothing is computed here but layout.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TextIO

from rich.text import Text

from tonnage.explain import Advice, Fix
from tonnage.explain.case import is_limited_by_itself
from tonnage.ledger import Category
from tonnage.recording import Allocation, Group, OutOfMemory, Recording
from tonnage.report.lines import (
    WIDTH,
    aligned,
    bar,
    clip,
    clip_start,
    column,
    heading,
    print_sections,
    spread,
    table_unit,
)
from tonnage.script.notebook import source_line
from tonnage.units import format_bytes

_LARGEST = 5
_FIXES = 4
_BAR_CELLS = 28
_STEPS = 6
_WORTH_SAYING = 0.01
# Phases that are not worth a word beside the others.
_BESIDE = ("setup", "other")
_VERDICTS = {
    "ok": ("fits", "bold green"),
    "oom": ("does not fit", "bold red"),
    "error": ("script failed", "bold yellow"),
}


def print_report(
    answers: Sequence[Recording], ran: Recording, advice: Advice, *, stream: TextIO, verbose: bool
) -> None:
    """All cards in a table where there are several, then the card that ran in full."""
    sections = [cards_table(answers)] if len(answers) > 1 else []
    sections += report_sections(ran, advice, verbose=verbose)
    print_sections(sections, stream)


def report_sections(recording: Recording, advice: Advice, *, verbose: bool) -> list[Iterator[Text]]:
    """The sections of one card's report, in order."""
    return [
        headline(recording),
        out_of_memory(recording),
        ledger(recording),
        course(recording, verbose),
        largest(recording),
        to_save_memory(recording, advice),
        footnotes(recording, verbose),
    ]


def headline(recording: Recording) -> Iterator[Text]:
    """The card, the verdict, the peaks and where the peak is."""
    header = recording.header
    yield spread(Text(f"  {_card(recording)}", style="bold"), Text(*_VERDICTS[header.outcome]))
    allocated, reserved = recording.peak_allocated_bytes, recording.peak_reserved_bytes
    process = recording.peak_process_bytes
    share = f"({100 * process / header.capacity_bytes:.0f} %)" if header.capacity_bytes else ""
    sizes = f"allocated {format_bytes(allocated)}   reserved {format_bytes(reserved)}   process {format_bytes(process)}"
    yield Text(f"  {sizes} {share}".rstrip())
    at = recording.peak_allocation
    if at is not None:
        yield Text(clip(f"  peak {_where(at.step, at.phase)}{_at_line(recording, at.line)}", WIDTH))
        yield from _inside_library(at)


def _card(recording: Recording) -> str:
    """The card, the version and the source, as far as a recording knows them: a snapshot does not say all."""
    header = recording.header
    size = f", {_short(header.capacity_bytes)}" if header.capacity_bytes else ""
    torch = header.torch_modelled.partition("+")[0]
    return " · ".join(filter(None, [f"{header.gpu_name}{size}", f"torch {torch}" if torch else "", header.source]))


def out_of_memory(recording: Recording) -> Iterator[Text]:
    """The line that dies, what it asked for and what there was."""
    oom = recording.oom
    if oom is None:
        return
    where = f"  out of memory {_where(oom.step, oom.phase)}{_at_line(recording, oom.line)}"
    yield Text(clip(where, WIDTH), style="red")
    yield from _inside_library(oom)
    maker = " of ".join(filter(None, [oom.operator.removeprefix("aten::"), oom.module]))
    short = format_bytes(max(0, oom.requested_bytes - oom.free_bytes))
    asked = f"asked for {format_bytes(oom.requested_bytes)}, free {format_bytes(oom.free_bytes)}: {short} short"
    yield Text(clip(f"  {asked}{f', in {maker}' if maker else ''}", WIDTH))
    unused = oom.reserved_bytes - oom.allocated_bytes
    if unused > _WORTH_SAYING * oom.reserved_bytes:
        yield Text(f"  {format_bytes(unused)} of the {format_bytes(oom.reserved_bytes)} reserved lay unused in pieces")


def ledger(recording: Recording) -> Iterator[Text]:
    """Bytes by category at the peak."""
    found = recording.ledger()
    total = found.total_bytes
    if not total:
        yield Text("  nothing was allocated on the GPU", style="yellow")
        return
    unit = table_unit(total)
    for category, size_bytes in found.ranked():
        share = size_bytes / total
        row = Text(f"  {category.label:<17}{column(size_bytes, unit)}  {100 * share:4.1f} %  ")
        row.append(bar(share, _BAR_CELLS), style="cyan").rstrip()
        yield row


def course(recording: Recording, verbose: bool) -> Iterator[Text]:
    """The peak of each phase and step, and what lay unused."""
    unit = table_unit(recording.peak_allocated_bytes)
    named = [phase for phase in recording.phases if phase.name not in _BESIDE] or recording.phases
    yield from _in_threes([f"{p.name} {format_bytes(p.peak_allocated_bytes, unit)}" for p in named])
    steps = list(_alike_steps(recording, unit))
    shown = steps if verbose else steps[:_STEPS]
    yield from _in_threes(shown)
    if len(shown) < len(steps):
        yield Text(f"            and {len(steps) - len(shown)} more: --verbose", style="dim")
    unused, reserved = recording.unused_at_peak_bytes, recording.peak_reserved_bytes
    if reserved:
        yield Text(f"  unused    {format_bytes(unused, unit)} of what was reserved ({100 * unused / reserved:.1f} %)")


def _in_threes(entries: Sequence[str]) -> Iterator[Text]:
    for start in range(0, len(entries), 3):
        yield Text(("  peak of   " if start == 0 else " " * 12) + "   ".join(entries[start : start + 3]))


def _alike_steps(recording: Recording, unit: str) -> Iterator[str]:
    """ "steps 2–20 1.34 GiB": neighbours whose peaks read the same are one entry."""
    steps = [(step.step, format_bytes(step.peak_allocated_bytes, unit)) for step in recording.steps if step.step]
    for peak, alike in groupby(steps, key=lambda step: step[1]):
        numbers = [number for number, _ in alike]
        name = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}–{numbers[-1]}"
        yield f"{name} {peak}"


def largest(recording: Recording) -> Iterator[Text]:
    """The largest tensors at the peak."""
    groups = recording.largest(_LARGEST)
    if not groups:
        return
    yield heading("largest at the peak")
    unit = table_unit(recording.peak_allocated_bytes)
    for row in aligned([_largest_cells(group, unit) for group in groups], right=2):
        yield Text(row)


def _largest_cells(group: Group, unit: str) -> tuple[str, ...]:
    count = f"{group.count} ×" if group.count > 1 else ""
    shape = "" if group.shape is None else str(list(group.shape))
    operator = group.operator.removeprefix("aten::")
    module = group.module or ("" if group.category is Category.ACTIVATIONS else group.category.label)
    return count, format_bytes(group.each_bytes, unit), f"{group.dtype} {shape}".strip(), operator, module, group.line


def to_save_memory(recording: Recording, advice: Advice) -> Iterator[Text]:
    """The changes that save most; of a run that died, whether each gets it past the line."""
    died = recording.header.outcome == "oom"
    yield from (Text(f"  {line}") for line in wrap(advice.why, WIDTH - 4))
    if advice.fixes:
        yield from _fix_rows(advice.fixes, died)
    if died and not is_limited_by_itself(recording):
        larger = (
            f"the {advice.larger_card} gets past that line" if advice.larger_card else "no known card is large enough"
        )
        yield Text(f"  a larger card: {larger}")


def _fix_rows(fixes: Sequence[Fix], died: bool) -> Iterator[Text]:
    title = "what would save it" if died else "to save memory"
    yield Text(f"  {title:<29}{'saves':>11}   costs", style="bold")
    for fix in fixes[:_FIXES]:
        mark = {True: "✓", False: "✗", None: " "}[fix.rescues]
        row = f" {mark} {clip(fix.change, 27):<28}{format_bytes(fix.saves_bytes):>11}   {fix.costs:<17}"
        beside = len(row) + len(fix.how) <= WIDTH
        yield Text(f"{row}{fix.how}" if beside else row.rstrip())
        if not beside:
            yield Text(f"     {clip(fix.how, WIDTH - 5)}", style="dim")


def footnotes(recording: Recording, verbose: bool) -> Iterator[Text]:
    """What the figures rest on: values that stood in, assumptions, and what is not modelled."""
    yield from _stand_ins(recording, verbose)
    for note in recording.notes:
        kind = "not modelled" if note.kind == "not_modelled" else "assumed"
        times = f" ×{note.count}" if note.count > 1 else ""
        style = "yellow" if note.kind == "not_modelled" else "dim"
        yield Text(clip(f"  {kind}: {note.operator}{times}: {note.text}", 10_000 if verbose else WIDTH), style=style)
    if recording.header.pinned_host_bytes:
        yield Text(f"  pinned host memory {format_bytes(recording.header.pinned_host_bytes)}", style="dim")
    caught = recording.header.ooms_caught
    if caught:
        times = "once" if caught == 1 else f"{caught} times"
        yield Text(f"  it ran out of memory {times}; the script caught that and went on", style="yellow")


def _stand_ins(recording: Recording, verbose: bool) -> Iterator[Text]:
    stand_ins = recording.stand_ins
    if not stand_ins:
        return
    total = sum(stand_in.count for stand_in in stand_ins)
    values = "value was" if total == 1 else "values were"
    if not verbose:
        first = f"{stand_ins[0].what} ×{stand_ins[0].count}{', …' if len(stand_ins) > 1 else ''}"
        yield Text(clip(f"  {total} {values} read from the virtual GPU ({first}): --verbose", WIDTH), style="dim")
        return
    yield Text(f"  {total} {values} read from the virtual GPU", style="dim")
    for stand_in in stand_ins:
        yield Text(f"   ×{stand_in.count:<5} {stand_in.what:<28} {stand_in.line:<24} {stand_in.value}", style="dim")


def cards_table(answers: Sequence[Recording]) -> Iterator[Text]:
    """One run on several cards."""
    yield Text(f"  {'card':<18}{'memory':>11}{'allocated':>12}{'reserved':>12}{'process':>12}", style="bold")
    for answer in answers:
        sizes = (answer.peak_allocated_bytes, answer.peak_reserved_bytes, answer.peak_process_bytes)
        cells = "".join(f"{format_bytes(size, 'GiB'):>12}" for size in sizes)
        verdict, style = _VERDICTS[answer.header.outcome]
        if answer.oom:
            verdict = clip_start(answer.oom.line, 11) or "dies"
        row = Text(f"  {answer.header.gpu:<18}{format_bytes(answer.header.capacity_bytes, 'GiB'):>11}{cells}  ")
        yield row + Text(verdict, style=style)
    if any(answer.oom for answer in answers):
        yield Text("  a card that cannot hold it shows the line that dies there", style="dim")


def _where(step: int, phase: str) -> str:
    return (
        "in " + ", ".join(filter(None, [f"step {step}" if step else "", phase])) if step or phase else "before any step"
    )


def _at_line(recording: Recording, line: str) -> str:
    """ ", at train.py:88  loss.backward()": with its source where the script is at hand."""
    if not line:
        return ""
    return f", at {line}  {source_line(recording.header.script, line)}".rstrip()


def _inside_library(at: Allocation | OutOfMemory) -> Iterator[Text]:
    """The library's line that the script's own line led to, where it led into one."""
    if at.stack and at.stack[0] != at.line:
        yield Text("  inside " + clip_start(at.stack[0], WIDTH - 9), style="dim")


def _short(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"

"""Why a run ran out of memory, as text and as JSON values. It only formats."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, TextIO

from rich.text import Text

from tonnage.explain import Advice, Diagnosis
from tonnage.explain.text import TextDiagnosis
from tonnage.recording import Recording
from tonnage.report.lines import cut, heading, picked, print_sections, report_width, said, spread, table, texts
from tonnage.report.runs.total import fix_lines, larger_card_words, total_lines
from tonnage.units import format_bytes
from tonnage.untrusted import printable

_FINDINGS = 4
_FIXES = 5
_LINES = 3


def diagnosis_sections(recording: Recording, diagnosis: Diagnosis, *, verbose: bool) -> list[Iterable[Text]]:
    """Return the cause, what the run needs in all, the evidence and what to do."""
    # The cause.
    header, total = recording.header, Advice(larger_card=diagnosis.larger_card, total=diagnosis.total)
    name = cut(header.program, report_width() // 2)
    card = f"{header.gpu_name}, {format_bytes(header.capacity_bytes)}" if header.capacity_bytes else header.gpu_name
    verdict = Text(diagnosis.cause, style="bold green" if diagnosis.cause == "none" else "bold red")
    cause = [*spread(Text(f"  {' · '.join(filter(None, (name, card)))}", style="bold"), verdict)]
    cause += said(diagnosis.sentence)
    # The evidence. The cause's own sentence is already printed above.
    evidence = [heading("evidence")] if diagnosis.evidence else []
    shown = diagnosis.evidence if verbose else diagnosis.evidence[:_FINDINGS]
    for finding in shown:
        words = finding.rule if finding.sentence in diagnosis.sentence else finding.sentence
        evidence += said(words, first=f"  {format_bytes(finding.size_bytes):>11}   ")
        rows = []
        for g in finding.lines if verbose else finding.lines[:_LINES]:
            what = f"{g.count:,} × {g.what}" if g.count > 1 else g.what
            rows.append((format_bytes(g.size_bytes), g.line or "no line known", what))
        evidence += texts(table(rows, align="><<", names=(1, 2), first=" " * 9) if rows else [], "dim")
    if more := len(diagnosis.evidence) - len(shown):
        evidence.append(Text(f"   and {more} more: --verbose", style="dim"))
    # What to do.
    fixes = list(fix_lines("what to do", diagnosis.fixes if verbose else diagnosis.fixes[:_FIXES], how_below=True))
    if diagnosis.larger_card:
        fixes.append(Text(f"  {larger_card_words(recording, diagnosis.larger_card)}"))
    return [cause, total_lines(recording, total), evidence, fixes]


def explain_figures(recording: Recording, diagnosis: Diagnosis) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    # `change` is complete: the name in the report and how exactly to do it.
    return {
        **picked(diagnosis, "cause sentence"),
        "evidence": [
            picked(finding, "rule sentence bytes:size_bytes")
            | {"lines": [picked(guilty, "line bytes:size_bytes count what") for guilty in finding.lines]}
            for finding in diagnosis.evidence
        ],
        "fixes": [asdict(fix) | {"change": f"{fix.change}: {fix.how}", "name": fix.change} for fix in diagnosis.fixes],
        "larger_card": diagnosis.larger_card,
        "total": asdict(diagnosis.total) if diagnosis.total else None,
        "outcome": recording.header.outcome,
        **picked(recording, "peak_allocated_bytes peak_reserved_bytes"),
    }


_OTHER_CAUSES = 3
_LABELS = {
    "asked": "asked for",
    "total": "the card",
    "free": "free on it",
    "allowed": "allowed to this process",
    "process": "held by this process",
    "allocated": "in tensors",
    "unallocated": "reserved, not in tensors",
    "private": "in private pools (CUDA graphs)",
    "elsewhere": "other allocations of the Mac's GPU",
}
_CERTAINTIES = {"certain": "bold red", "likely": "bold red", "possible": "bold yellow"}


def print_text_diagnosis(name: str, found: TextDiagnosis, *, stream: TextIO, verbose: bool = False) -> None:
    """Print the cause, the numbers, what they do and do not prove, and what to do."""
    numbers, others = [], found.causes[1:] if verbose else found.causes[1 : 1 + _OTHER_CAUSES]
    if found.numbers is not None:
        sizes = [(label, getattr(found.numbers, name)) for name, label in _LABELS.items()]
        held, count = found.numbers.others, len(found.numbers.others)
        sizes += [(f"held by {count} other process{'es' if count > 1 else ''}", sum(held))] if held else []
        numbers = [Text(f"  {format_bytes(size):>11}   {label}") for label, size in sizes if size is not None]
    # The cause, and where.
    first, frame, episode = found.first, found.place.own_frame, found.episode
    title = [cut(printable(name), report_width() // 2), found.speaker]
    verdict = Text(f"{first.cause}, {first.certainty}", style=_CERTAINTIES[first.certainty])
    cause = [*spread(Text(f"  {' · '.join(filter(None, title))}", style="bold"), verdict)]
    cause += said(printable(f"{first.title}: {first.sentence}."))
    if frame:
        phase = f", in {found.place.phase}" if found.place.phase else ""
        behind = printable(f":{frame.line} ({cut(frame.function, 30)}){phase}")
        cause.append(Text(f"  at {cut(printable(frame.file), report_width() - 5 - len(behind))}{behind}", style="dim"))
    elif found.place.phase:
        cause.append(Text(f"  in {found.place.phase}", style="dim"))
    if episode.count > 1:
        words = f"  the last of {episode.count:,} in the text, at line {episode.first_line:,}"
        cause.append(Text(words, style="dim"))
    sections: list[Iterable[Text]] = [
        cause,
        [heading("the numbers"), *numbers] if found.numbers is not None else [],
        _listed("proved", [("   · ", sentence) for sentence in found.proves if sentence]),
        _listed("other causes", [(f"  {one.certainty:>9}  {one.cause}: ", one.sentence) for one in others], " " * 13),
        _listed("not proved", [("   · ", sentence) for sentence in found.unproved if sentence]),
        _listed("what to do", [(f"   {number}  ", step) for number, step in enumerate(found.steps, 1)]),
    ]
    print_sections(sections, stream)


def _listed(title: str, entries: list[tuple[str, str]], rest: str | None = None) -> Iterator[Text]:
    """Yield a heading and sentences, each after its mark; nothing without sentences."""
    if entries:
        yield heading(title)
    for first, sentence in entries:
        yield from said(printable(sentence), first=first, rest=rest)


def text_figures(found: TextDiagnosis) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    frame, numbers = found.place.own_frame, found.numbers
    sizes: dict[str, Any] | None = None
    if numbers:
        sizes = {f"{name}_bytes": getattr(numbers, name) for name in _LABELS}
        sizes |= {"other_process_bytes": list(numbers.others), "device": numbers.device}
    return {
        **picked(found.first, "cause certainty"),
        "sentence": printable(f"{found.first.title}: {found.first.sentence}."),
        "causes": [picked(one, "cause certainty") | {"sentence": printable(one.sentence)} for one in found.causes],
        **picked(found, "speaker framework"),
        "phase": found.place.phase or None,
        "operator": found.place.operator.name if found.place.operator else None,
        "line": printable(f"{frame.file}:{frame.line}") if frame else None,
        "numbers": sizes,
        "proved": [printable(sentence) for sentence in found.proves if sentence],
        "not_proved": [printable(sentence) for sentence in found.unproved],
        "steps": [printable(step) for step in found.steps],
        **picked(found.episode, "found:count text_line:first_line"),
    }

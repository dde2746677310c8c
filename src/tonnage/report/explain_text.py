"""Why memory ran out, judged by an error's text, as text and as JSON values. It only formats."""

from collections.abc import Iterator
from typing import Any, TextIO

from rich.text import Text

from tonnage.explain.text import TextDiagnosis
from tonnage.report.lines import cut, heading, print_sections, report_width, spread, wrapped
from tonnage.units import format_bytes
from tonnage.untrusted import printable

_CAUSES = 3
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
_STYLES = {"certain": "bold red", "likely": "bold red", "possible": "bold yellow"}


def print_text_diagnosis(name: str, found: TextDiagnosis, *, stream: TextIO, verbose: bool = False) -> None:
    """Print the cause, the numbers, what they do and do not prove, and what to do."""
    sections = [_cause(name, found), _numbers(found), _sentences("proved", found.proves)]
    sections += [_others(found, verbose), _sentences("not proved", found.unproved), _steps(found)]
    print_sections(sections, stream)


def _cause(name: str, found: TextDiagnosis) -> Iterator[Text]:
    first = found.first
    frame = found.place.own_frame
    title = [cut(printable(name), report_width() // 2), found.speaker]
    verdict = Text(f"{first.cause}, {first.certainty}", style=_STYLES[first.certainty])
    yield from spread(Text(f"  {' · '.join(filter(None, title))}", style="bold"), verdict)
    yield from map(Text, wrapped(printable(f"{first.title}: {first.sentence}.")))
    if frame:
        phase = f", in {found.place.phase}" if found.place.phase else ""
        behind = printable(f":{frame.line} ({cut(frame.function, 30)}){phase}")
        yield Text(f"  at {cut(printable(frame.file), report_width() - 5 - len(behind))}{behind}", style="dim")
    if found.episode.count > 1:
        yield Text(
            f"  the last of {found.episode.count:,} in the text, at line {found.episode.first_line:,}", style="dim"
        )


def _numbers(found: TextDiagnosis) -> Iterator[Text]:
    numbers = found.numbers
    if numbers is None:
        return
    yield heading("the numbers")
    for name, label in _LABELS.items():
        size = getattr(numbers, name)
        if size is not None:
            yield Text(f"  {format_bytes(size):>11}   {label}")
    if numbers.others:
        count = len(numbers.others)
        yield Text(
            f"  {format_bytes(sum(numbers.others)):>11}   held by {count} other process{'es' if count > 1 else ''}"
        )


def _sentences(title: str, sentences: tuple[str, ...]) -> Iterator[Text]:
    shown = [sentence for sentence in sentences if sentence]
    if not shown:
        return
    yield heading(title)
    for sentence in shown:
        yield from map(Text, wrapped(printable(sentence), first="   · "))


def _others(found: TextDiagnosis, verbose: bool) -> Iterator[Text]:
    others = found.causes[1:] if verbose else found.causes[1 : 1 + _CAUSES]
    if not others:
        return
    yield heading("other causes")
    for suspect in others:
        yield from map(
            Text,
            wrapped(printable(suspect.sentence), first=f"  {suspect.certainty:>9}  {suspect.cause}: ", rest=" " * 13),
        )


def _steps(found: TextDiagnosis) -> Iterator[Text]:
    if not found.steps:
        return
    yield heading("what to do")
    for number, step in enumerate(found.steps, 1):
        yield from map(Text, wrapped(printable(step), first=f"   {number}  "))


def text_figures(found: TextDiagnosis) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    frame, numbers = found.place.own_frame, found.numbers
    sizes: dict[str, Any] | None = None
    if numbers:
        sizes = {f"{name}_bytes": getattr(numbers, name) for name in _LABELS}
        sizes |= {"other_process_bytes": list(numbers.others), "device": numbers.device}
    return {
        "cause": found.first.cause,
        "certainty": found.first.certainty,
        "sentence": printable(f"{found.first.title}: {found.first.sentence}."),
        "causes": [
            {"cause": s.cause, "certainty": s.certainty, "sentence": printable(s.sentence)} for s in found.causes
        ],
        "speaker": found.speaker,
        "framework": found.framework,
        "phase": found.place.phase or None,
        "operator": found.place.operator.name if found.place.operator else None,
        "line": printable(f"{frame.file}:{frame.line}") if frame else None,
        "numbers": sizes,
        "proved": [printable(sentence) for sentence in found.proves if sentence],
        "not_proved": [printable(sentence) for sentence in found.unproved],
        "steps": [printable(step) for step in found.steps],
        "found": found.episode.count,
        "text_line": found.episode.first_line,
    }

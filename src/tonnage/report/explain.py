"""Why a run ran out of memory, as text and as JSON values. It only formats."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

from rich.text import Text

from tonnage.explain import Advice, Diagnosis, Finding
from tonnage.recording import Recording
from tonnage.report.fixes import fix_lines
from tonnage.report.lines import cut, heading, print_sections, report_width, spread, table, wrapped
from tonnage.report.total import larger_card_words, total_lines
from tonnage.units import format_bytes

_FINDINGS = 4
_FIXES = 5
_LINES = 3
_STYLES = {"none": "bold green"}


def print_diagnosis(recording: Recording, diagnosis: Diagnosis, *, stream: TextIO, verbose: bool = False) -> None:
    """Print the cause, the evidence and what to do."""
    print_sections(diagnosis_sections(recording, diagnosis, verbose=verbose), stream)


def diagnosis_sections(recording: Recording, diagnosis: Diagnosis, *, verbose: bool) -> list[Iterator[Text]]:
    """Return the sections of the report, in order."""
    total = Advice(larger_card=diagnosis.larger_card, total=diagnosis.total)
    return [
        _cause(recording, diagnosis),
        total_lines(recording, total),
        _evidence(diagnosis, verbose),
        _what_to_do(recording, diagnosis, verbose),
    ]


def _cause(recording: Recording, diagnosis: Diagnosis) -> Iterator[Text]:
    header = recording.header
    name = cut(header.program, report_width() // 2)
    card = f"{header.gpu_name}, {format_bytes(header.capacity_bytes)}" if header.capacity_bytes else header.gpu_name
    verdict = Text(diagnosis.cause, style=_STYLES.get(diagnosis.cause, "bold red"))
    yield from spread(Text(f"  {' · '.join(filter(None, (name, card)))}", style="bold"), verdict)
    yield from map(Text, wrapped(diagnosis.sentence))


def _evidence(diagnosis: Diagnosis, verbose: bool) -> Iterator[Text]:
    if not diagnosis.evidence:
        return
    yield heading("evidence")
    shown = diagnosis.evidence if verbose else diagnosis.evidence[:_FINDINGS]
    for finding in shown:
        # The cause's own sentence is already printed above.
        is_said = finding.sentence in diagnosis.sentence
        yield from _finding(finding, finding.rule if is_said else finding.sentence, verbose)
    if len(shown) < len(diagnosis.evidence):
        yield Text(f"   and {len(diagnosis.evidence) - len(shown)} more: --verbose", style="dim")


def _finding(finding: Finding, words: str, verbose: bool) -> Iterator[Text]:
    yield from map(Text, wrapped(words, first=f"  {format_bytes(finding.size_bytes):>11}   "))
    lines = finding.lines if verbose else finding.lines[:_LINES]
    rows = [
        (format_bytes(g.size_bytes), g.line or "no line known", (f"{g.count:,} × {g.what}" if g.count > 1 else g.what))
        for g in lines
    ]
    yield from (
        Text(row, style="dim") for row in (table(rows, align="><<", names=(1, 2), first=" " * 9) if rows else ())
    )


def _what_to_do(recording: Recording, diagnosis: Diagnosis, verbose: bool) -> Iterator[Text]:
    fixes = diagnosis.fixes if verbose else diagnosis.fixes[:_FIXES]
    yield from fix_lines("what to do", fixes, how_below=True)
    if diagnosis.larger_card:
        yield Text(f"  {larger_card_words(recording, diagnosis.larger_card)}")


def explain_figures(recording: Recording, diagnosis: Diagnosis) -> dict[str, object]:
    """Return the JSON values; the keys are stable and every size is in bytes."""
    # `change` is complete: the name in the report and how exactly to do it.
    return {
        "cause": diagnosis.cause,
        "sentence": diagnosis.sentence,
        "evidence": [_finding_figures(finding) for finding in diagnosis.evidence],
        "fixes": [asdict(fix) | {"change": f"{fix.change}: {fix.how}", "name": fix.change} for fix in diagnosis.fixes],
        "larger_card": diagnosis.larger_card,
        "total": asdict(diagnosis.total) if diagnosis.total else None,
        "outcome": recording.header.outcome,
        "peak_allocated_bytes": recording.peak_allocated_bytes,
        "peak_reserved_bytes": recording.peak_reserved_bytes,
    }


def _finding_figures(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "sentence": finding.sentence,
        "bytes": finding.size_bytes,
        "lines": [{"line": g.line, "bytes": g.size_bytes, "count": g.count, "what": g.what} for g in finding.lines],
    }

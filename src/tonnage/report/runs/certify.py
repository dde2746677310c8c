"""A certificate as terminal text and JSON values. It only formats."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from tonnage import __version__
from tonnage.recording.writes import writes_sentence
from tonnage.report.lines import picked, report_width, table, wrapped
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from tonnage.certify.certificate import Certificate
    from tonnage.certify.memo import Memo
    from tonnage.certify.program import ProgramPart
    from tonnage.certify.running import TrainingResult

_WIPE = "\r\x1b[2K"


def certificate_lines(certificate: "Certificate", training: "TrainingResult", larger_card: str) -> Iterator[str]:
    """Yield the verdict, the parts that need most, and what would make it safe."""
    gpu, verdict = certificate.gpu, certificate.verdict
    title = f"  {gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB · torch {training.torch} · virtual"
    yield from ("", f"{title:<{report_width() - len(verdict) - 2}}{verdict}", *wrapped(verdict_words(certificate)))
    if not certificate.survives:
        needed, limit = certificate.needed_bytes, certificate.own_limit_bytes
        at_least = max(certificate.in_all.allocated_bytes) + certificate.lived.outside_bytes
        words = f"needs {format_bytes(needed)} in all" if needed else f"needs at least {format_bytes(at_least)} in all"
        holder = f"the {larger_card} holds it" if larger_card else "no known card holds it"
        own = f"the script allows itself {format_bytes(limit)}" if limit is not None else holder
        yield from wrapped(f"{words}; {own}")
    # What was walked through.
    shapes = {part.shape for part in training.program.parts if part.kind == "step"}
    evaluated = sum(part.kind == "evaluation" for part in training.program.parts)
    counts = f"{training.steps:,} steps with batches of {len(shapes):,} shapes"
    counts += f", {evaluated:,} batches of evaluation" if evaluated else ""
    yield from wrapped(f"{counts}, {training.replayed_parts:,} of them replayed")
    yield ""
    rows = [("needs most", "batch", "allocated", "reserved")]
    for part, allocated, reserved in certificate.heaviest:
        rows.append((_where(part), _batch(part), format_bytes(allocated), format_bytes(reserved)))
    yield from table(rows, align="<<>>")
    yield ""
    if first := next((part for part, _, _ in certificate.heaviest if part.kind == "step" and part.step > 1), None):
        yield from wrapped(f"to test a card or a change in one step, put the batch of {_where(first)} first")
    if certificate.changes:
        yield from ("", "  with one of these all of it survives")
        for change in certificate.changes:
            tight = ", tight" if change.lived.retries else ""
            words = f"{change.words}: at most {format_bytes(change.lived.peak_bytes)}{tight}; {change.cost}"
            yield from wrapped(words, first=" ✓ ", rest="   ")
    elif not certificate.survives:
        words = "no limit on lengths makes it safe here: take a smaller batch, or ask `tonnage run` for advice"
        yield from wrapped(words)
    yield from (line for note in training.notes for line in wrapped(note))
    if training.writes and (training.writes.files or training.writes.fate == "in place"):
        yield from wrapped(writes_sentence(training.writes))
    yield ""


def verdict_words(certificate: "Certificate") -> str:
    """Return "safe, at most 22.10 GiB in step 8,113 (a batch of 8 × 3,981)", or where it fails and how much is missing."""
    lived, part, failure = certificate.lived, certificate.part, certificate.lived.failure
    batch = f" (a batch of {_batch(part)})" if part.shape else ""
    if failure is None:
        words = f"{certificate.verdict}, at most {format_bytes(lived.peak_bytes)} in {_where(part)}{batch}"
        if lived.retries:
            first = _where(certificate.program.parts[lived.first_retry])
            often = "once" if lived.retries == 1 else f"{lived.retries:,} times"
            words += f"; the cache is emptied {often} to make room, first in {first}"
        return words
    short = format_bytes(failure.short_bytes)
    asked = f"asked for {format_bytes(failure.requested_bytes)} on top of {format_bytes(failure.allocated_bytes)}"
    return f"dies in {_where(part)}{batch}, at {failure.line}: {asked}, {short} short"


def _where(part: "ProgramPart") -> str:
    if part.kind == "evaluation":
        return f"evaluation after step {part.step:,}" if part.step else "evaluation before the first step"
    if part.kind in ("between", "data"):
        return f"what follows step {part.step:,}"
    if part.kind == "setup":
        return "setup"
    return f"step {part.step:,}" + (f", micro-batch {part.micro_batch}" if part.micro_batch > 1 else "")


def _batch(part: "ProgramPart") -> str:
    return " × ".join(f"{one:,}" for one in part.shape)


def certificate_figures(certificate: "Certificate", training: "TrainingResult", larger_card: str) -> dict[str, Any]:
    """Return the same as JSON values."""
    lived, failure = certificate.lived, certificate.lived.failure
    return {
        "version": __version__,
        "gpu": certificate.gpu.key,
        "torch": training.torch,
        **picked(certificate, "verdict retries:lived.retries"),
        **picked(training, "steps replayed:replayed_parts"),
        "words": verdict_words(certificate),
        "part": _part_figures(certificate.part),
        "peak_allocated_bytes": max(lived.allocated_bytes),
        "peak_reserved_bytes": max(lived.reserved_bytes),
        **picked(certificate, "peak_process_bytes:lived.peak_bytes needs_bytes:needed_bytes"),
        "failure": failure and picked(failure, "line requested_bytes free_bytes short_bytes"),
        "heaviest": [
            _part_figures(part) | {"allocated_bytes": allocated, "reserved_bytes": reserved}
            for part, allocated, reserved in certificate.heaviest
        ],
        "changes": [
            picked(change, "words costs:cost peak_process_bytes:lived.peak_bytes") for change in certificate.changes
        ],
        "larger_card": larger_card or None,
        "notes": training.notes,
    }


def _part_figures(part: "ProgramPart") -> dict[str, Any]:
    return picked(part, "kind step micro_batch") | {"shape": list(part.shape)}


class StepProgress:
    """A progress line for terminals only, drawn at most twice a second."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream, self._began = stream, time.monotonic()
        self._next = self._began + 0.5 if stream.isatty() else float("inf")
        self._drawn = False

    def __call__(self, memo: "Memo") -> None:
        """Show the progress."""
        now = time.monotonic()
        if now >= self._next:
            self._next, self._drawn = now + 0.5, True
            shown = f"  step {memo.step:,} · {memo.replayed_parts:,} replayed · {now - self._began:.0f} s"
            self._stream.write(_WIPE + shown)
            self._stream.flush()

    def wipe(self) -> None:
        """Clear the line."""
        if self._drawn:
            self._stream.write(_WIPE)
            self._stream.flush()

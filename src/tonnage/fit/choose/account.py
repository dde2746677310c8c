"""A plan in words: before, technique by technique, after. At home in 80 columns."""

import textwrap

from tonnage.fit.plan import Plan
from tonnage.fit.rehearsal import Rehearsed
from tonnage.units import format_bytes


def account(plan: Plan, measured: Rehearsed | None) -> str:
    title = f"{plan.device} · batch of {plan.batch_rows} · budget {format_bytes(plan.budget_bytes)}"
    lines = [title, "", _line("", "peak", "step", ""), *_plain(plan)]
    for row in plan.rows:
        lines.append(_line(f"  {row.title}", _signed_size(-row.saved_bytes), _signed_time(row.seconds)))
        lines += _indented(row.why)
    lines.append(_line("fitted, predicted", _size(plan.peak_bytes), time_words(plan.step_s)))
    if measured is not None:
        seconds = "" if measured.step_s is None else time_words(measured.step_s)
        lines.append(_line("fitted, measured", _size(measured.peak_reserved_bytes), seconds, "reserved"))
    if plan.host_bytes:
        lines.append(f"host memory {format_bytes(plan.host_bytes)} of {format_bytes(plan.host_budget_bytes)}, pinned")
    return "\n".join(lines)


def _plain(plan: Plan) -> list[str]:
    if not plan.plain_peak_bytes:
        return [_line("plain", "does not fit", ""), *_indented("not even one row of it")]
    seconds = time_words(plan.plain_step_s) if plan.plain_step_s else ""
    return [_line("plain", _size(plan.plain_peak_bytes), seconds)]


def _indented(words: str) -> list[str]:
    return textwrap.wrap(words, 80, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


def _line(name: str, size: str, seconds: str, note: str = "") -> str:
    return f"{name:<38}{size:>14}{seconds:>14}  {note}".rstrip()


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes)


def _signed_size(size_bytes: int) -> str:
    return ("−" if size_bytes < 0 else "+") + format_bytes(abs(size_bytes))


def time_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _signed_time(seconds: float) -> str:
    words = time_words(abs(seconds))
    return words if words == "0 ms" else ("−" if seconds < 0 else "+") + words

"""How a run ended, the total that it needs, which GPUs hold it, and what would save memory, as text and as JSON values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from rich.text import Text

from tonnage.allocator.segments import UNLIMITED_BYTES
from tonnage.explain import Advice, Fix
from tonnage.explain.case import is_limited_by_itself
from tonnage.explain.total import AllCards, CardAnswer, Total
from tonnage.recording import Recording
from tonnage.recording.beyond import PATIENCE, REPEATS, TO_ITS_END
from tonnage.report.lines import picked, report_width, said, table, wrapped
from tonnage.units import GIB, format_bytes
from tonnage.untrusted import clipped

_LONGEST_REASON = 160  # characters
_STOPPED = {
    REPEATS: "it was stopped when its steps repeated: what it would do after them is not in this",
    PATIENCE: "it was stopped after five minutes: what it would do later is not in this",
}
_WORDS = {"ok": "fits", "oom": "does not fit", "error": "script failed", "depends": "depends on unknown values"}
CLIMBS = "fits so far, but climbs"


def total_lines(recording: Recording, advice: Advice, *, alone: bool = False) -> Iterator[Text]:
    """Yield "needs 33.70 GiB in all; the a100-40 holds it; batch 5 of 8 fits here", and how far the run was observed.

    For a run that was `alone` on its card and whose total is unknown, say how to find it.
    """
    total = advice.total
    if total is None:
        # Nothing is known after the line that failed.
        oom = recording.oom
        if oom is None or recording.whole:
            return
        if oom.requested_bytes > UNLIMITED_BYTES:
            yield from said("no card will ever hold that one tensor: look at its extents")
        elif alone and recording.header.source == "virtual":
            yield from said("what it needs in all is not known: tonnage run --gpu all tells")
        return
    yield from said(total_words(recording, advice), "bold")
    place = ", ".join(filter(None, [f"step {total.step}" if total.step else "", total.phase]))
    at = f", at {total.line}" if total.line else ""
    peak = format_bytes(total.peak_allocated_bytes)
    yield from said(f"most of it in {place or 'no step'}{at}: {peak} allocated")
    yield from said(caveat_words(total), "yellow")


def total_words(recording: Recording, advice: Advice) -> str:
    """Return it in one sentence."""
    total = advice.total
    assert total
    least = "at least " if total.ending not in (TO_ITS_END, REPEATS) else ""
    words = [f"needs {least}{format_bytes(total.needed_bytes)} in all"]
    it = "that much" if least else "it"
    if not is_limited_by_itself(recording):
        words.append(f"the {advice.larger_card} holds {it}" if advice.larger_card else f"no known card holds {it}")
    if total.batch:
        words.append(f"batch {total.batch} of {total.of_batch} fits here")
    return "; ".join(words)


def caveat_words(total: Total) -> str:
    """Say what part of the run is not in its total; empty if it ran to its end."""
    if total.ending == TO_ITS_END:
        return ""
    return _STOPPED.get(total.ending) or f"without the limit it failed later: {clipped(total.ending, _LONGEST_REASON)}"


def larger_card_words(recording: Recording, card: str | None) -> str:
    """Say whether the next larger GPU holds all of the run, or as much of it as is known."""
    if card is None:
        return "a larger card: no known card is large enough"
    return f"a larger card: the {card} " + ("holds the whole run" if recording.whole else "gets past that line")


def verdict_words(outcome: str, climbs: bool = False) -> str:
    """Return the verdict; a run that completed but whose memory climbs has not shown that it fits."""
    return CLIMBS if climbs and outcome == "ok" else _WORDS[outcome]


_CHANGE = 28
_SAVES = 11
_COSTS = 15


def fix_lines(title: str, fixes: Sequence[Fix], *, how_below: bool = False) -> Iterator[Text]:
    """Yield a heading, then the changes; nothing if there are none. "✓": a run that failed fits with it.

    How to make a change follows on the same line if it fits, unless `how_below`.
    """
    if not fixes:
        return
    # As wide as the longest name needs, if there is room for the cost.
    width = min(max(_CHANGE, *(len(fix.change) + 1 for fix in fixes)), report_width() - 3 - _SAVES - 3 - _COSTS)
    before_how = 3 + width + _SAVES + 3 + max(_COSTS, *(len(fix.costs) for fix in fixes))
    yield Text(f"  {title:<{width + 1}}{'saves':>{_SAVES}}   costs", style="bold")
    for fix in fixes:
        mark = {True: "✓", False: "✗", None: " "}[fix.rescues]
        changes = wrapped(fix.change, first=f" {mark} ", rest="   ", width=3 + width)
        costs = wrapped(fix.costs, first="", width=report_width() - 3 - width - _SAVES - 3)
        saves = [format_bytes(fix.saves_bytes) if fix.saves_bytes else "–"]
        columns = zip_longest(changes, saves, costs, fillvalue="")
        rows = [f"{change:<{3 + width}}{saved:>{_SAVES}}   {cost}".rstrip() for change, saved, cost in columns]
        how = f"{fix.how}   (run, not computed)" if fix.was_run else fix.how
        row = f"{rows[0]:<{before_how}}  {how}"
        if not how_below and len(rows) == 1 and len(row) <= report_width():
            yield Text(row.rstrip())
        else:
            yield from map(Text, rows)
            yield from said(how, "dim", first="     ")


def all_cards_sections(cards: AllCards) -> list[Iterator[Text]]:
    """Return what the run needs, the GPUs that hold it, and the line that fails on others."""
    held, died = [], []
    for row in cards.rows():
        if row[0].oom is not None:
            died.append((_names(row, 26), _gib(row[0].gpu.memory_bytes), place_words(row[0])))
            continue
        low, high = (f"{pick(a.gpu.memory_bytes for a in row) / GIB:.1f}" for pick in (min, max))
        memory = f"{low} GiB" if low == high else f"{low}–{high} GiB"
        most, left = max(a.process_bytes for a in row), min(a.left_bytes for a in row)
        held.append((_names(row, 36), memory, _gib(most), _gib(left)))
    smallest = cards.smallest
    holder = f"the {smallest.gpu.key} is the smallest card that holds it" if smallest else "no known card holds it"
    sentence = f"needs {format_bytes(cards.needed_bytes)} in all; {holder}"
    return [
        (Text(line, style="bold") for line in wrapped(sentence)),
        _table(("these hold it", "memory", "it takes", "left"), held, "<>>>", ()),
        _table(("these do not", "memory", "it dies"), died, "<><", (2,)),
    ]


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], align: str, names: tuple[int, ...]
) -> Iterator[Text]:
    if not rows:
        return
    first, *rest = table([head, *rows], align=align, names=names)
    yield Text(first, style="bold")
    yield from map(Text, rest)


def _names(row: list[CardAnswer], of_80: int) -> str:
    """Return as many names as fit, and how many more there are."""
    names, room = [answer.gpu.key for answer in row], of_80 * report_width() // 80 - 4
    count = 1
    while count < len(names) and len(", ".join(names[: count + 1])) <= room:
        count += 1
    more = len(names) - count
    return ", ".join(names[:count]) + (f", +{more}" if more else "")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def place_words(answer: CardAnswer) -> str:
    """Describe where it fails, like "in step 2, forward, at train.py:10"; empty for a GPU that holds it."""
    oom = answer.oom
    if oom is None:
        return ""
    when = ", ".join(filter(None, [f"step {oom.step}" if oom.step else "", oom.phase])) or "before any step"
    return f"{when}, at {oom.line}" if oom.line else when


def all_cards_figures(cards: AllCards) -> dict[str, Any]:
    """Return the same as JSON values."""
    smallest = cards.smallest
    return {
        "needed_bytes": cards.needed_bytes,
        "smallest_card": smallest.gpu.key if smallest else None,
        "cards": [
            picked(answer, "gpu:gpu.name gpu_key:gpu.key capacity_bytes:gpu.memory_bytes")
            | {"fits": answer.oom is None, "peak_process_bytes": answer.process_bytes}
            | {"oom": asdict(answer.oom) if answer.oom else None}
            for answer in cards.answers
        ],
    }

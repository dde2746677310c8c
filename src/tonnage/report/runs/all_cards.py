"""Which GPUs hold a run, as text and as JSON: one row for GPUs of about the same memory. It only formats."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from tonnage.explain.cards import AllCards, CardAnswer
from tonnage.report.lines import picked, report_width, table, wrapped
from tonnage.units import GIB, format_bytes


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

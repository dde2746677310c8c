"""The engine's memory as text: the ledger of the GPU before it starts, and the KV cache while it serves.

    12 running · 3 waiting · 4,812 tokens/s                     pool 34.17 GiB
    used        21.40 GiB  62.6 %  █████████████████████▎
    slack        0.14 GiB   0.4 %  ▏

Parts of the pool are disjoint and sum to it. Nothing is sampled or measured here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tonnage.budget.serving.own_engine import GRAPHS, OwnCard
from tonnage.ledger import Category
from tonnage.report.lines import column, ledger_row, packed, picked, spread, table_unit, texts, wrapped
from tonnage.units import format_bytes, percent

if TYPE_CHECKING:
    from tonnage.serve.stats import KvLedger

_STYLES = {"used": "green", "shared": "cyan", "cached": "blue", "slack": "yellow", "reserved": "dim", "free": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The engine's load. `hit_rate` is the prefix cache's share of prompt tokens; None without requests."""

    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    hit_rate: float | None = None
    preemptions: int = 0

    @property
    def pace(self) -> str:
        """Requests and throughput."""
        return f"{self.running:,} running · {self.waiting:,} waiting · {self.tokens_per_s:,.0f} tokens/s"

    @property
    def more(self) -> str:
        """What is mentioned only if it happened."""
        parts = [] if self.hit_rate is None else [f"{percent(self.hit_rate, 0)} prefix hits"]
        return " · ".join(parts + [f"{self.preemptions:,} preempted"] * bool(self.preemptions))


def card_rows(card: OwnCard) -> list[tuple[str, int]]:
    """Return what the card holds, in reading order; the rows sum to the card."""
    graphs = card.reserved_for(Category.WORKSPACE, GRAPHS)
    return [
        ("weights", card.weight_bytes),
        ("KV blocks", card.pool.size_bytes),
        ("activations", card.reserved_for(Category.ACTIVATIONS)),
        ("CUDA graphs", graphs),
        ("workspace", card.reserved_for(Category.WORKSPACE) - graphs),
        ("context", card.reserved_for(Category.CONTEXT)),
        ("left", card.left_bytes),
    ]


def card_lines(card: OwnCard, *, model: str) -> Iterator[Text | str]:
    """Yield the ledger of the whole card."""
    limits, pool, unit = card.limits, card.pool, table_unit(card.capacity_bytes)
    budget = f"budget {format_bytes(card.limit_bytes, unit)} of {format_bytes(card.capacity_bytes, unit)}"
    yield from spread(Text(f"  {model} · {card.name}", style="bold"), Text(budget))
    yield from wrapped(
        f"{limits.weights} weights, {limits.kv} cache · {limits.max_seqs:,} sequences × {limits.context:,} tokens"
    )
    yield ""
    for word, size in card_rows(card):
        if size or word in ("KV blocks", "left"):
            yield _row(word, size, card.capacity_bytes, unit)
    yield ""
    each = format_bytes(pool.block_bytes)
    yield from wrapped(f"{pool.blocks:,} blocks × {each} · {pool.tokens:,} tokens in pages of {pool.block}")
    sequences = max(pool.blocks - 1, 0) // -(-limits.context // pool.block)
    yield f"  {sequences:,} sequences at the full context of {limits.context:,} tokens"
    # How the measured memory compares with the plan.
    if card.measured_bytes is not None:
        over = card.measured_bytes - card.limit_bytes
        beyond = f": {format_bytes(over)} over the budget" if over > 0 else ""
        planned, measured = (format_bytes(size, unit) for size in (card.total_bytes, card.measured_bytes))
        words = packed([f"planned {planned}", f"measured {measured}{beyond}"])
        yield from texts(words, "yellow" if over > 0 else "")


def _row(word: str, size: int, whole: int, unit: str) -> Text:
    return ledger_row(word, f"{column(size, unit)} ", size / whole if whole else 0.0, width=14, cells=34, wide=7)


def kv_rows(ledger: "KvLedger") -> list[tuple[str, int]]:
    """Return the parts of the pool, those in use first."""
    return [(word, getattr(ledger, f"{word}_bytes")) for word in _STYLES]


def kv_frame(ledger: "KvLedger", load: Load) -> Iterator[Text]:
    """Yield the current pool, for repeated drawing."""
    rows = kv_rows(ledger)
    whole = sum(size for _, size in rows)
    yield from spread(Text(f"  {load.pace}", style="bold"), Text(f"pool {format_bytes(whole)}"))
    for word, size in rows:
        yield Text(_row(word, size, whole, table_unit(whole)).plain, style=_STYLES[word])
    if load.more:
        yield Text(f"  {load.more}", style="dim")


def kv_line(ledger: "KvLedger", load: Load) -> str:
    """Return the same as one plain line, for logs."""
    rows = kv_rows(ledger)
    whole = sum(size for _, size in rows) or 1
    parts = ", ".join(f"{word} {percent(size / whole)}" for word, size in rows if size)
    return " · ".join(filter(None, (load.pace, load.more, parts)))


def card_figures(card: OwnCard) -> dict[str, Any]:
    """Return the card's ledger as JSON values; keys say that sizes are in bytes."""
    keys = ("parameters", "kv_cache", "activations", "graphs", "workspace", "context", "left")
    pool = "blocks:pool.blocks block:pool.block bytes_per_block:pool.block_bytes tokens:pool.tokens measured_bytes"
    ledger = {f"{key}_bytes": size for key, (_, size) in zip(keys, card_rows(card), strict=True)}
    return picked(card, "gpu:name capacity_bytes limit_bytes") | {"ledger": ledger} | picked(card, pool)


def kv_figures(ledger: "KvLedger") -> dict[str, int]:
    """Return the pool as JSON values; the parts sum to `total_bytes`."""
    rows = kv_rows(ledger)
    return {f"{word}_bytes": size for word, size in rows} | {"total_bytes": sum(size for _, size in rows)}

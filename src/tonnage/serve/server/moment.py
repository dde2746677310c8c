"""The engine at one moment, as metrics, the ledger in the API and the terminal show it; taken between two steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.serve.accounts import KvLedger

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What runs, what waits, where the KV bytes are; and totals since the start."""

    running: int
    waiting: int
    ledger: KvLedger
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    generated: int

    @classmethod
    def of(cls, engine: "Engine") -> "Moment":
        """Now."""
        scheduler = engine.scheduler
        counters = scheduler.counters
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            ledger=engine.kv_ledger(),
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            generated=engine.stats.tokens,
        )

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold."""
        ledger = self.ledger
        held = ledger.used_bytes + ledger.slack_bytes + ledger.shared_bytes
        return held / max(1, held + ledger.cached_bytes + ledger.free_bytes)

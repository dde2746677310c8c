"""Statistics of an engine, counted as it runs: times, every byte of the KV cache, and its state for the server."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from tonnage.serve.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine


@dataclass(slots=True)
class Stats:
    """Totals since the start. `host_s` is the host's own work, without waiting for the device."""

    steps: int = 0
    tokens: int = 0  # sampled
    computed_tokens: int = 0  # of prompts, and sampled ones
    busy_s: float = 0.0
    host_s: float = 0.0
    failed_steps: int = 0
    waste_s: float = 0.0  # the slack share of the pool, integrated over time
    watched_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.busy_s / max(self.steps, 1)

    @property
    def waste(self) -> float:
        """The slack share of the KV pool, averaged over time."""
        return self.waste_s / self.watched_s if self.watched_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLedger:
    """A partition of the cache into six parts."""

    used_bytes: int  # tokens of one sequence each
    slack_bytes: int  # room in a sequence's own blocks for future tokens: mostly the rest of its last block
    cached_bytes: int  # unreferenced prefix blocks, reusable until evicted
    shared_bytes: int  # full blocks of two sequences or more, counted once
    reserved_bytes: int  # the null block
    free_bytes: int

    @property
    def total(self) -> int:
        """Bytes of the whole cache."""
        return sum(astuple(self))


def kv_ledger(scheduler: Scheduler, block_bytes: int) -> KvLedger:
    """Return where the cache's bytes are now. Tokens of a launched step count as written."""
    pool = scheduler.pool
    own_blocks = pool.count - 1 - pool.available - pool.shared
    # Shared blocks are full, so unwritten entries are in blocks of one sequence.
    slack_tokens = sum(len(sequence.blocks) * pool.size - sequence.computed for sequence in scheduler.running)
    slack_bytes = slack_tokens * block_bytes // pool.size
    return KvLedger(
        used_bytes=own_blocks * block_bytes - slack_bytes, slack_bytes=slack_bytes,
        cached_bytes=pool.cached * block_bytes, shared_bytes=pool.shared * block_bytes, reserved_bytes=block_bytes,
        free_bytes=(pool.available - pool.cached) * block_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Running and waiting sequences, KV bytes, and totals since the start. Taken between two steps."""

    running: int
    waiting: int
    ledger: KvLedger
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    generated: int

    @classmethod
    def of(cls, engine: "Engine") -> "EngineState":
        """Return the current state of an engine."""
        scheduler = engine.scheduler
        counters = scheduler.counters
        return cls(
            running=len(scheduler.running), waiting=len(scheduler.waiting), ledger=engine.kv_ledger(),
            preemptions=counters.preemptions, prefix_queries=counters.prefix_queries, prefix_hits=counters.prefix_hits,
            generated=engine.stats.tokens,
        )  # fmt: skip

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold."""
        ledger = self.ledger
        held = ledger.used_bytes + ledger.slack_bytes + ledger.shared_bytes
        return held / max(1, held + ledger.cached_bytes + ledger.free_bytes)

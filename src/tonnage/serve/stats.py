"""Every byte of the KV cache at one moment: used, slack, cached, shared, reserved or free.

It costs the same, whatever the cache's size: the pool counts as it goes, and each running sequence is looked at once.
"""

from dataclasses import astuple, dataclass

from tonnage.serve.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLedger:
    """A partition of the cache: the six parts are all of it."""

    used_bytes: int  # tokens of one sequence each
    slack_bytes: int  # room in a sequence's own blocks for tokens to come: mostly the rest of its last block
    cached_bytes: int  # prefixes that nobody uses now, there to be used again until their room is needed
    shared_bytes: int  # full blocks of two sequences or more, counted once
    reserved_bytes: int  # the null block
    free_bytes: int

    @property
    def total(self) -> int:
        """The whole cache."""
        return sum(astuple(self))


def kv_ledger(scheduler: Scheduler, block_bytes: int) -> KvLedger:
    """Where the cache's bytes are now. A token that a launched step writes counts as written."""
    pool = scheduler.pool
    own_blocks = pool.count - 1 - pool.available - pool.shared
    # Shared blocks are full, so what is not written lies in blocks of one sequence alone.
    slack_tokens = sum(len(sequence.blocks) * pool.size - sequence.computed for sequence in scheduler.running)
    slack_bytes = slack_tokens * block_bytes // pool.size
    return KvLedger(
        used_bytes=own_blocks * block_bytes - slack_bytes,
        slack_bytes=slack_bytes,
        cached_bytes=pool.cached * block_bytes,
        shared_bytes=pool.shared * block_bytes,
        reserved_bytes=block_bytes,
        free_bytes=(pool.available - pool.cached) * block_bytes,
    )

"""Find one model that several ranks of a host each hold in host memory.

There are two pieces of evidence: DDP, FSDP or DeepSpeed got the same whole model in these ranks (`WholeModel`), and
each has parameters of that size in its part of the host's peak. One copy is needed, by the rank that distributes it.
"""

from dataclasses import dataclass

from tonnage.errors import UnknownGpu
from tonnage.hardware.cluster import find_cluster
from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.recording.host import CHECKPOINT
from tonnage.units import GIB

_WORTH_BYTES = GIB
# Tensors of less than 1 MiB are not in the ledger.
_WHOLE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class ModelCopies:
    """How many ranks of the fullest host hold a copy, the bytes of all copies, and of all but the largest."""

    engine: str
    copies: int
    held_bytes: int
    spared_bytes: int


def host_capacity_bytes(gpu: str) -> int:
    """Return a GPU's share of its presumed host's memory; 0 if unknown."""
    try:
        return find_cluster(gpu).host_memory_bytes
    except UnknownGpu:
        return 0


def model_copies(summary: ClusterSummary) -> ModelCopies | None:
    """Return the copies of the host that needs most; None if one rank alone holds the model, or little is saved."""
    ranks = summary.host_ranks
    held = sorted(filter(None, map(_copy_bytes, ranks)))
    # Ranks of other groups may hold other models.
    held = held[-max((rank.whole_model.copies for rank in ranks), default=0) :]
    if len(held) < 2 or sum(held[:-1]) < _WORTH_BYTES:
        return None
    engine = next(rank.whole_model.engine for rank in ranks if _copy_bytes(rank))
    return ModelCopies(engine, len(held), sum(held), sum(held[:-1]))


def _copy_bytes(rank: RankSummary) -> int:
    """Return what a rank holds of a whole model: its parameters, and a checkpoint being read."""
    parameters = rank.host_parts.get(str(Category.PARAMETERS), 0)
    if not rank.whole_model.size_bytes or parameters < _WHOLE_SHARE * rank.whole_model.size_bytes:
        return 0
    return parameters + min(rank.host_parts.get(CHECKPOINT, 0), parameters)

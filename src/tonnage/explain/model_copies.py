"""One model that the ranks of a host each hold in its memory, by what an engine got and what the host's ledger has.

There are two pieces of evidence: DDP, FSDP or DeepSpeed got the same whole model in these ranks (`WholeModel`), and each
of them has parameters of that size among its part of the host's peak. One copy is needed, by the rank that hands it on.
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
    """How many ranks of the fullest host hold a copy, what the copies take in all, and what all but the largest do."""

    engine: str
    copies: int
    held_bytes: int
    spared_bytes: int


def host_capacity_bytes(gpu: str) -> int:
    """A card's share of the memory of the host that it is taken to sit in; 0 where none is known."""
    try:
        return find_cluster(gpu).host_memory_bytes
    except UnknownGpu:
        return 0


def model_copies(summary: ClusterSummary) -> ModelCopies | None:
    """The copies of the host that needs most; None where one rank alone holds the model, or little is spared."""
    ranks = summary.host_ranks
    held = sorted(filter(None, map(_copy_bytes, ranks)))
    # Ranks of other groups may hold other models.
    held = held[-max((rank.whole_model.copies for rank in ranks), default=0) :]
    if len(held) < 2 or sum(held[:-1]) < _WORTH_BYTES:
        return None
    engine = next(rank.whole_model.engine for rank in ranks if _copy_bytes(rank))
    return ModelCopies(engine, len(held), sum(held), sum(held[:-1]))


def _copy_bytes(rank: RankSummary) -> int:
    """What a rank holds of a whole model: its parameters, and a checkpoint of it that is being read."""
    parameters = rank.host_parts.get(str(Category.PARAMETERS), 0)
    if not rank.whole_model.size_bytes or parameters < _WHOLE_SHARE * rank.whole_model.size_bytes:
        return 0
    return parameters + min(rank.host_parts.get(CHECKPOINT, 0), parameters)

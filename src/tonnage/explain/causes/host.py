"""Host memory: a model on every rank, a checkpoint beside its model, workers, a host that is too small.

Also pinned memory, which the host cannot use otherwise: if it runs out, the script fails, not the GPU. There are two
pieces of evidence for one model that several ranks each hold: DDP, FSDP or DeepSpeed got the same whole model in these
ranks (`WholeModel`), and each has parameters of that size in its part of the host's peak. One copy is needed, by the
rank that distributes it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.errors import UnknownGpu
from tonnage.explain.case import Case
from tonnage.explain.fixes import Cause, Finding, Fix, Guilty
from tonnage.explain.words import words_for
from tonnage.hardware.cluster import find_cluster
from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.recording.host import CHECKPOINT, PINNED, WORKERS, HostMoment
from tonnage.techniques import change_of
from tonnage.units import GIB, format_bytes

_WORTH_BYTES = GIB
_WHOLE_SHARE = 0.9  # tensors of less than 1 MiB are not in the ledger
# Share of the weights: a checkpoint read tensor by tensor never reaches it. FP32 is twice as wide as BF16.
_MOST_OF_IT = 0.45
_MAP_IT = "build the model under torch.device('meta'), torch.load(..., mmap=True), load_state_dict(..., assign=True)"
_HOST_FAILED = re.compile(
    r"cudaHost|pin[_ ]memory|pinned|cannot allocate memory|MemoryError|out of memory", re.IGNORECASE
)


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


def host_memory(case: Case) -> Finding | None:
    """Return the host's peak: a cause if the host has less, else evidence if something can be saved."""
    host = case.recording.host
    if host is None:
        return None
    peak, gpu, needed, who = host.peak, case.recording.header.gpu, host.needed_bytes, "the host needs"
    ranks = case.cluster.host_ranks if case.cluster else ()
    if case.cluster and len(ranks) > 1:
        gpu, needed = f"{case.cluster.gpus_per_host}x{case.cluster.gpu}", sum(rank.host_bytes for rank in ranks)
        who = f"a host with {len(ranks)} ranks needs"
    capacity, spared = host_capacity_bytes(gpu), list(_spared(case, peak))
    too_small = 0 < capacity < needed
    if not (too_small or spared):
        return None
    sentence = f"{who} {format_bytes(needed)}" + (f" at {peak.line}" if peak.line else "")
    if too_small:
        sentence += f", and {'has' if ranks else 'the card comes with'} {format_bytes(capacity)}"
    lines = tuple(Guilty(g.line, g.size_bytes, g.count, f"{g.part} {g.operator}".strip()) for g in peak.largest)
    cause: Cause | None = "host-memory" if too_small else None
    words, fixes = [words for words, _ in spared], tuple(fix for _, fix in spared)
    return Finding("host-memory", "; ".join([sentence, *words]), needed, cause, 0, lines, fixes)


def _spared(case: Case, peak: HostMoment) -> Iterator[tuple[str, Fix]]:
    """Yield what need not be there, and how to avoid it."""
    if case.cluster and (copies := model_copies(case.cluster)):
        words = f"{copies.copies} ranks each hold the whole model, {format_bytes(copies.held_bytes)} in all"
        how = words_for(case.recording, "load-once", copies.engine.lower())
        change, costs = change_of("load-once")
        yield f"{words}, and {copies.engine} needs it on one", Fix(change, copies.spared_bytes, costs, how)
    read, weights = (peak.parts.get(part, 0) for part in (CHECKPOINT, Category.PARAMETERS))
    if read >= _WORTH_BYTES and peak.step:
        words = f"the checkpoint ({format_bytes(read)}) is still held in step {peak.step}"
        yield words, Fix("let go of the checkpoint (host)", read, "nothing", "del the checkpoint once it is loaded")
    elif read >= _WORTH_BYTES and read >= _MOST_OF_IT * weights >= _MOST_OF_IT**2 * read:
        beside = f"the checkpoint ({format_bytes(read)}) lies beside the model that it is copied into"
        yield f"{beside} ({format_bytes(weights)})", Fix("map the checkpoint (host)", read, "nothing", _MAP_IT)
    if (held := peak.parts.get(WORKERS, 0)) >= _WORTH_BYTES:
        words = f"data loader workers hold {format_bytes(held)} for themselves"
        how = "fewer num_workers, or a dataset that workers read from mapped files and arrays, not from Python lists"
        yield words, Fix("let workers share the data (host)", held, "nothing", how)


def pinned_host(case: Case) -> Finding | None:
    """Return the pinned bytes, if they are large or if the host refused more."""
    header = case.recording.header
    held = header.pinned_host_bytes
    refused = header.outcome == "error" and bool(held) and bool(_HOST_FAILED.search(header.error))
    if held < GIB and not refused:
        return None
    ending = " when the host refused more" if refused else ""
    sentence = f"{format_bytes(held)} of host memory were pinned{ending}; each request is rounded up to a power of two"
    host = case.recording.host
    at_peak = [group for group in host.peak.largest if group.part == PINNED] if host else []
    lines = tuple(Guilty(group.line, group.size_bytes, group.count, group.operator) for group in at_peak)
    how = "pin_memory=False or a smaller prefetch_factor in the DataLoader, or a pool of exact-size buffers"
    saves = host.peak.parts.get(PINNED, 0) if host and not refused else held
    fix = Fix("pin less of the host", saves, "slower copies", how)
    cause: Cause | None = "pinned-host" if refused else None
    return Finding("pinned-host", sentence, held, cause, held, lines, (fix,) if refused or saves >= GIB else ())

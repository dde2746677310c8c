"""Memory of the host: a model on every rank, a checkpoint beside its model, workers; a host that is too small."""

from collections.abc import Iterator

from tonnage.errors import UnknownGpu
from tonnage.explain.case import Case
from tonnage.explain.findings import Cause, Finding, Guilty
from tonnage.explain.fixes import Fix
from tonnage.explain.model_copies import model_copies
from tonnage.explain.words import words_for
from tonnage.hardware.cluster import find_cluster
from tonnage.ledger import Category
from tonnage.recording.host import CHECKPOINT, WORKERS, HostMoment
from tonnage.units import GIB, format_bytes

_WORTH_BYTES = GIB
# Of the weights: a checkpoint that is read tensor by tensor never has as much in memory. FP32 is twice as wide as BF16.
_MOST_OF_IT = 0.45
_MAP_IT = "build the model under torch.device('meta'), torch.load(..., mmap=True), load_state_dict(..., assign=True)"


def host_memory(case: Case) -> Finding | None:
    """What the host needs at its height: a cause where it has not as much, else evidence where something can be spared."""
    host = case.recording.host
    if host is None:
        return None
    peak, gpu, needed, who = host.peak, case.recording.header.gpu, host.needed_bytes, "the host needs"
    ranks = case.cluster.host_ranks if case.cluster else ()
    if case.cluster and len(ranks) > 1:
        gpu, needed = f"{case.cluster.gpus_per_host}x{case.cluster.gpu}", sum(rank.host_bytes for rank in ranks)
        who = f"a host with {len(ranks)} ranks needs"
    capacity = _capacity_bytes(gpu)
    too_small = 0 < capacity < needed
    spared = [*_copies(case), *_spared(peak)]
    if not (too_small or spared):
        return None
    at = f" at {peak.line}" if peak.line else ""
    sentence = f"{who} {format_bytes(needed)}{at}"
    if too_small:
        sentence += f", and {'has' if ranks else 'the card comes with'} {format_bytes(capacity)}"
    lines = tuple(Guilty(g.line, g.size_bytes, g.count, f"{g.part} {g.operator}".strip()) for g in peak.largest)
    cause: Cause | None = "host-memory" if too_small else None
    words, fixes = [words for words, _ in spared], tuple(fix for _, fix in spared)
    return Finding("host-memory", "; ".join([sentence, *words]), needed, cause, 0, lines, fixes)


def _capacity_bytes(gpu: str) -> int:
    try:
        return find_cluster(gpu).host_memory_bytes
    except UnknownGpu:
        return 0


def _copies(case: Case) -> Iterator[tuple[str, Fix]]:
    """The same model on every rank of a host."""
    copies = model_copies(case.cluster) if case.cluster else None
    if copies is None:
        return
    held = f"{copies.copies} ranks each hold the whole model, {format_bytes(copies.held_bytes)} in all"
    words = f"{held}, and {copies.engine} needs it on one"
    how = words_for(case.recording, f"load_once_{copies.engine.lower()}")
    yield words, Fix("load the model on one rank (host)", copies.spared_bytes, "a broadcast at the start", how)


def _spared(peak: HostMoment) -> Iterator[tuple[str, Fix]]:
    """What lies there that need not, and how to be without it."""
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

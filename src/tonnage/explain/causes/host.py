"""Host memory: a model on every rank, a checkpoint beside its model, workers, a host that is too small.

Also pinned memory, which the host cannot use otherwise: if it runs out, the script fails, not the GPU.
"""

import re
from collections.abc import Iterator

from tonnage.explain.case import Case
from tonnage.explain.findings import Cause, Finding, Guilty
from tonnage.explain.fixes import Fix
from tonnage.explain.model_copies import host_capacity_bytes, model_copies
from tonnage.explain.words import words_for
from tonnage.ledger import Category
from tonnage.recording.host import CHECKPOINT, PINNED, WORKERS, HostMoment
from tonnage.units import GIB, format_bytes

_WORTH_BYTES = GIB
# Share of the weights: a checkpoint read tensor by tensor never reaches it. FP32 is twice as wide as BF16.
_MOST_OF_IT = 0.45
_MAP_IT = "build the model under torch.device('meta'), torch.load(..., mmap=True), load_state_dict(..., assign=True)"
_HOST_FAILED = re.compile(
    r"cudaHost|pin[_ ]memory|pinned|cannot allocate memory|MemoryError|out of memory", re.IGNORECASE
)


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
    capacity = host_capacity_bytes(gpu)
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


def _copies(case: Case) -> Iterator[tuple[str, Fix]]:
    """Yield copies of one model on every rank of a host."""
    copies = model_copies(case.cluster) if case.cluster else None
    if copies is None:
        return
    held = f"{copies.copies} ranks each hold the whole model, {format_bytes(copies.held_bytes)} in all"
    words = f"{held}, and {copies.engine} needs it on one"
    how = words_for(case.recording, f"load_once_{copies.engine.lower()}")
    yield words, Fix("load the model on one rank (host)", copies.spared_bytes, "a broadcast at the start", how)


def _spared(peak: HostMoment) -> Iterator[tuple[str, Fix]]:
    """Yield what need not be there, and how to avoid it."""
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

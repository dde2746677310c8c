"""Memory of the host: a checkpoint beside the model that it is copied into, workers, and a host that is too small."""

from tonnage.errors import UnknownGpu
from tonnage.explain.case import Case
from tonnage.explain.findings import Cause, Finding, Guilty
from tonnage.explain.fixes import Fix
from tonnage.hardware.cluster import find_cluster
from tonnage.ledger import Category
from tonnage.recording.host import CHECKPOINT, WORKERS, HostMoment
from tonnage.units import GIB, format_bytes

_WORTH_BYTES = GIB
# Of the weights: a checkpoint that is read tensor by tensor never has as much in memory.
_MOST_OF_IT = 0.5


def host_memory(case: Case) -> Finding | None:
    """What the host needs at its height: a cause where it has not as much, else evidence where something can be spared."""
    host = case.recording.host
    if host is None:
        return None
    peak, capacity = host.peak, _capacity_bytes(case.recording.header.gpu)
    too_small = 0 < capacity < host.needed_bytes
    words, fixes = _spared(peak)
    if not (too_small or words):
        return None
    at = f" at {peak.line}" if peak.line else ""
    sentence = f"the host needs {format_bytes(host.needed_bytes)}{at}"
    if too_small:
        sentence += f", and {format_bytes(capacity)} come with the card"
    lines = tuple(Guilty(g.line, g.size_bytes, g.count, f"{g.part} {g.operator}".strip()) for g in peak.largest)
    cause: Cause | None = "host-memory" if too_small else None
    return Finding("host-memory", "; ".join([sentence, *words]), host.needed_bytes, cause, 0, lines, tuple(fixes))


def _capacity_bytes(gpu: str) -> int:
    try:
        return find_cluster(gpu).host_memory_bytes
    except UnknownGpu:
        return 0


def _spared(peak: HostMoment) -> tuple[list[str], list[Fix]]:
    """What lies there that need not, and how to be without it."""
    words, fixes = [], []
    read, weights = (peak.parts.get(part, 0) for part in (CHECKPOINT, Category.PARAMETERS))
    if read >= _WORTH_BYTES and read >= _MOST_OF_IT * weights and weights >= _MOST_OF_IT * read:
        words.append(
            f"the checkpoint ({format_bytes(read)}) lies beside the model that it is copied into ({format_bytes(weights)})"
        )
        how = (
            "build the model under torch.device('meta'), torch.load(..., mmap=True), load_state_dict(..., assign=True)"
        )
        fixes.append(Fix("map the checkpoint (host)", read, "nothing", how))
    if (held := peak.parts.get(WORKERS, 0)) >= _WORTH_BYTES:
        words.append(f"data loader workers hold {format_bytes(held)} for themselves")
        how = "fewer num_workers, or a dataset that workers read from mapped files and arrays, not from Python lists"
        fixes.append(Fix("let workers share the data (host)", held, "nothing", how))
    return words, fixes

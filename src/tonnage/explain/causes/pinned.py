"""Pinned host memory: pages that the host cannot use otherwise. Where it runs out, the script fails, not the card."""

import re

from tonnage.explain.case import Case
from tonnage.explain.findings import Cause, Finding, Guilty
from tonnage.explain.fixes import Fix
from tonnage.recording.host import PINNED
from tonnage.units import GIB, format_bytes

_HOST_FAILED = re.compile(
    r"cudaHost|pin[_ ]memory|pinned|cannot allocate memory|MemoryError|out of memory", re.IGNORECASE
)


def pinned_host(case: Case) -> Finding | None:
    """The pinned bytes, where they are many or where the host refused more."""
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

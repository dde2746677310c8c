"""Gradients accumulated under DistributedDataParallel without `no_sync`: every backward reduces them all.

The script's text tells whether it wraps its model and uses `no_sync`; the recording tells how often backward runs in a
step.
"""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, Guilty
from tonnage.explain.fixes import Fix
from tonnage.explain.source import Source
from tonnage.ledger import Category
from tonnage.recording.timeline import spans

_WRAPPERS = ("DistributedDataParallel", "DDP")


def ddp_accumulation(case: Case) -> Finding | None:
    """Return the backward passes per step, if more than one, with the line that wraps the model."""
    length = len(case.recording.timeline.allocated_bytes)
    turns = [name for name, _, _ in spans(case.recording.marks, "phase", length)]
    optimizers = turns.count("optimizer")
    times = round(turns.count("backward") / optimizers) if optimizers else 0
    source = Source.find(case.recording.header.script) if times > 1 else None
    if source is None or source.mentions("no_sync"):
        return None
    line = next((found for name in _WRAPPERS if (found := source.mentions(name))), None)
    if line is None:
        return None
    gradients = sum(a.block_bytes for a in case.live if a.category is Category.GRADIENTS)
    sentence = f"each of {times} backwards a step reduces all gradients: DistributedDataParallel without no_sync()"
    how = "with model.no_sync(): around all but the last backward"
    fix = Fix("no_sync while accumulating", 0, f"saves {times - 1} of {times} reductions a step", how)
    lines = (Guilty(f"{source.name}:{line}", gradients, 1, "wraps the model"),)
    return Finding("ddp-accumulation", sentence, gradients, lines=lines, fixes=(fix,))

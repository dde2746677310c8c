"""A checkpoint on the GPU beside the tensors loaded from it.

`torch.load(..., map_location="cuda")` puts all of it there; `load_state_dict` copies it into the parameters, and it
stays as long as a name holds it. A block counts if a parameter or optimizer state has its shape and dtype.
"""

from collections import Counter

from tonnage.explain.case import Case, live_at
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.phases import is_worth, moment_of, waste_of
from tonnage.explain.rewriting import Rewrite
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_LOADING = ("loading", "model loading")
_LOADED = (Category.PARAMETERS, Category.OPTIMIZER_STATES)


def checkpoint_held_twice(case: Case) -> Finding | None:
    """Return the checkpoint's blocks at the decisive moment, else at the peak of loading."""
    held, still = _twice(case, case.moment), True
    if not is_worth(case, sum(a.block_bytes for a in held)):
        moment = moment_of(case, _LOADING)
        held, still = ([] if moment is None else _twice(case, moment)), False
    size = sum(a.block_bytes for a in held)
    if not is_worth(case, size):
        return None
    lines = guilty_lines(held)
    gone = {a.index for a in held}
    kept = [a for a in case.needed.allocations if a.index not in gone]
    how = 'torch.load(..., map_location="cpu"), and del the checkpoint once it is loaded'
    fix = fix_of(case.needed, Rewrite("load through the host", "a copy at the start", how, kept))
    when = "are still" if still and not case.death else "are"
    sentence = (
        f"{format_bytes(size)} of a checkpoint {when} on the GPU beside what they are loaded into{lines_words(lines)}"
    )
    return Finding("checkpoint-twice", sentence, size, "loading", waste_of(case, held), lines, (fix,) if fix else ())


def _twice(case: Case, moment: int) -> list[Allocation]:
    """Return blocks made by loading that match parameters or states but are neither."""
    live = live_at(case.needed, moment)
    counts = Counter((a.shape, a.dtype) for a in live if a.category in _LOADED)
    found = []
    for a in live:
        if a.phase in _LOADING and a.category not in _LOADED and a.shape and counts[a.shape, a.dtype]:
            counts[a.shape, a.dtype] -= 1
            found.append(a)
    return found

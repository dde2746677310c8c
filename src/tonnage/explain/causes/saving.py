"""Saving that allocates on the GPU: a full state dict gathered there, or a copy of it in another dtype."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines, lines_words
from tonnage.explain.fixes import fix_of
from tonnage.explain.phases import is_worth, live_in, waste_of
from tonnage.explain.rewriting import Rewrite
from tonnage.units import format_bytes

_SAVING = ("saving",)
_SHARDED = ("all_gather", "allgather", "c10d")


def saving_on_gpu(case: Case) -> Finding | None:
    """Return the tensors that saving held at once; the largest of them is on the GPU in any case."""
    made = [a for a in live_in(case, _SAVING) if a.phase in _SAVING]
    size = sum(a.block_bytes for a in made)
    if not is_worth(case, size):
        return None
    lines = guilty_lines(made)
    gathers = any(word in a.operator for a in case.needed.allocations if a.phase in _SAVING for word in _SHARDED)
    largest = max(made, key=lambda a: a.block_bytes)
    gone = {a.index for a in case.needed.allocations if a.phase in _SAVING} - {largest.index}
    how = (
        "StateDictOptions(full_state_dict=True, cpu_offload=True), or save shards (torch.distributed.checkpoint)"
        if gathers
        else "tensor by tensor to the host: {name: value.cpu() for name, value in model.state_dict().items()}"
    )
    kept = [a for a in case.needed.allocations if a.index not in gone]
    fix = fix_of(case.needed, Rewrite("save from the host", "a slower save", how, kept))
    what = "a full state dict is gathered" if gathers else "copies for a checkpoint are made"
    sentence = f"{what} on the GPU, {format_bytes(size)}{lines_words(lines)}"
    waste = waste_of(case, [a for a in made if a.index in gone])
    return Finding("saving-on-gpu", sentence, size, "saving", waste, lines, (fix,) if fix else ())

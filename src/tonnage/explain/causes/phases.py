"""Evaluation, saving, loading and data that hold more than they need.

Outputs of evaluation are kept in a list (blocks of one line, alive together) or in one tensor that grows with every
batch, as in the transformers Trainer without `eval_accumulation_steps`. Without `no_grad`, the outputs of most modules
are alive at once.

Batches wait because a loader prefetches or a name still holds the last one; what waits when a run ends was never
used and is not classified as an input, but recognized by the line that made it. Data sets are kept there for the whole
run, of which a step needs a part. `torch.load(..., map_location="cuda")` puts a whole checkpoint there;
`load_state_dict` copies it into the parameters, and it stays as long as a name holds it. Saving gathers a full state
dict there, or copies it in another dtype.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import pairwise

from tonnage.explain.case import Case
from tonnage.explain.fixes import Finding, finding
from tonnage.explain.rewriting import Rewrite, outside
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.recording.recording import is_copied_batch

_EVALUATION = ("evaluation",)
_BATCHES = 3
_GRAPH_MODULES = 4
_GRAPH_SHARE = 0.5
_TRAINER = "transformers/trainer"
_Place = tuple[int, str, tuple[str, ...], str]  # evaluation number, module, stack, operator
_BATCH = (Category.INPUTS, Category.OTHER)
_LOADING = ("loading", "model loading")
_LOADED = (Category.PARAMETERS, Category.OPTIMIZER_STATES)
_SAVING = ("saving",)
_SHARDED = ("all_gather", "allgather", "c10d")


def kept_predictions(case: Case) -> Finding | None:
    """Return what evaluation keeps of every batch, and what moving it to the host saves."""
    alive, made = {a.index for a in case.live_in(_EVALUATION)}, _kept(case)
    kept = [a for a in made if a.index in alive]
    if not case.is_worth(kept):
        return None
    how = "append(output.cpu()), or what the metric needs of it"
    if any(frame.startswith(_TRAINER) for a in kept for frame in a.stack):
        how = "eval_accumulation_steps=1, or preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1)"
    rewrite = Rewrite("predictions on the host", "a copy each batch", how, case.without(made))
    words = "the outputs of all evaluation batches are kept on the GPU, {size}{at}"
    return finding(case, "kept-predictions", words, kept, rewrite, cause="evaluation")


def _kept(case: Case) -> list[Allocation]:
    """Return blocks that one place made in an evaluation: several alive together, or ever longer ones."""
    starts = [start for start, _ in case.spans_of(_EVALUATION)]
    by_place: dict[_Place, list[Allocation]] = {}
    for a in case.needed.allocations:
        if a.phase in _EVALUATION and a.category is not Category.PARAMETERS:
            which = bisect_right(starts, a.born)
            by_place.setdefault((which, a.module, a.stack or (a.line,), a.operator), []).append(a)
    batches: dict[int, list[int]] = {}  # start of each batch by evaluation: what a module does first recurs
    for (which, module, *_), members in by_place.items():
        if module and which not in batches:
            batches[which] = [a.born for a in members]

    def is_kept(members: list[Allocation], batches: list[int]) -> bool:
        """Say whether blocks of several batches were all alive at the last one, or were concatenated ever longer."""
        if len({bisect_right(batches, a.born) for a in members}) < _BATCHES:
            return False
        last = members[-1].born
        if all(a.died is None or a.died > last for a in members):
            return True
        joins = "cat" in members[0].operator and not members[0].module  # within a module it is a cache
        return joins and all(before.block_bytes < after.block_bytes for before, after in pairwise(members))

    return [a for (which, *_), m in by_place.items() if is_kept(m, batches.get(which, [])) for a in m]


def graph_in_evaluation(case: Case) -> Finding | None:
    """Return module outputs saved for a backward that never runs: `no_grad` was forgotten."""
    live = [a for a in case.live_in(_EVALUATION) if a.phase in _EVALUATION and a.category is Category.ACTIVATIONS]
    alive = {a.module for a in live if a.module}
    made = [a for a in case.needed.allocations if a.phase in _EVALUATION and a.module]
    if len(alive) < max(_GRAPH_MODULES, _GRAPH_SHARE * len({a.module for a in made})) or not case.is_worth(live):
        return None
    # Blocks of evaluation would be freed once the block after the next one is allocated.
    births = sorted(a.born for a in made)
    freed = []
    for a in case.needed.allocations:
        ahead = bisect_right(births, a.born) + 1
        is_made_there = a.phase in _EVALUATION and a.module and ahead < len(births)
        is_late = is_made_there and (a.died is None or a.died > births[ahead])
        freed.append(replace(a, died=births[ahead]) if is_late else a)
    rewrite = Rewrite("evaluate without gradients", "nothing", "with torch.inference_mode():", freed)
    words = "an evaluation keeps {size} for a backward that never comes: torch.no_grad() is missing"
    return finding(case, "graph-in-evaluation", words, live, rewrite, cause="evaluation")


def training_in_evaluation(case: Case) -> Finding | None:
    """Return gradients and activations of the last step that are alive during evaluation."""
    held = [a for a in case.live_in(_EVALUATION) if _is_of_training(a)]
    if not case.is_worth(held):
        return None
    gaps = case.spans_of(_EVALUATION)
    apart = [part for a in case.needed.allocations for part in outside(a, gaps if _is_of_training(a) else ())]
    has_gradients = any(a.category is Category.GRADIENTS for a in held)
    how = "optimizer.zero_grad(set_to_none=True)" if has_gradients else "del loss, output"
    rewrite = Rewrite("free training's memory before evaluating", "nothing", f"{how} before the evaluation", apart)
    what = "gradients" if has_gradients else "activations of the last step"
    words = f"{{size}} of training are still held while it evaluates: {what} were not freed"
    return finding(case, "training-in-evaluation", words, held, rewrite, cause="evaluation")


def _is_of_training(a: Allocation) -> bool:
    made = a.category is Category.ACTIVATIONS and a.phase in ("forward", "backward")
    return a.category is Category.GRADIENTS or made


def waiting_batches(case: Case) -> Finding | None:
    """Return inputs that one line made at the decisive moment: all but the latest of each line wait or are held."""
    # Inputs copied from the host, in order of allocation, by what requested them, without resident data sets.
    blocks = case.needed.allocations
    made: dict[tuple[tuple[str, ...], str, str], list[Allocation]] = {
        place: [] for place in {(a.stack, a.line, a.operator) for a in blocks if is_copied_batch(a)}
    }
    for a in blocks:
        if a.category in _BATCH and (place := (a.stack, a.line, a.operator)) in made:
            made[place].append(a)
    batches = [members for members in made.values() if sum(a.died is None for a in members) <= len(members) / 2]
    there = {a.index for a in case.live}
    at_once = [[a for a in members if a.index in there] for members in batches]
    extra = [a for members in at_once for a in members[:-1]]
    if not case.is_worth(extra):
        return None
    # Each batch starts only after the previous one is freed.
    end, in_turn = len(case.needed.timeline.allocated_bytes), {}
    for members in batches:
        free_from = 0
        for a in members:
            dies = end if a.died is None else a.died
            in_turn[a.index] = replace(a, born=min(free_from, dies - 1)) if a.born < free_from else a
            free_from = max(free_from, dies)
    changed = [in_turn.get(a.index, a) for a in blocks]
    how = "del the batch after its step, or prefetch fewer"
    rewrite = Rewrite("one batch at a time", "perhaps a wait", how, changed)
    words = f"{max(map(len, at_once))} batches are on the GPU at once, {{size}} beside the one at work{{at}}"
    return finding(case, "waiting-batches", words, extra, rewrite, cause="data")


def resident_data(case: Case) -> Finding | None:
    """Return data alive from before the first iteration until after the last."""
    if not case.turns:
        return None
    begins = case.recording.begins_at  # older blocks may be anything, most likely a model
    first, last = case.turns[0], case.turns[-1]
    early = [a for a in case.live if a.category in _BATCH and begins <= a.born < first and a.phase in ("", "setup")]
    stays = [a for a in early if a.died is None or a.died > last]
    if not case.is_worth(stays):
        return None
    how = 'leave it on the host, and move one batch at a time: batch.to("cuda", non_blocking=True)'
    rewrite = Rewrite("data on the host", "a copy each step", how, case.without(stays))
    return finding(case, "resident-data", "{size} of data are on the GPU for the whole run{at}", stays, rewrite)


def checkpoint_held_twice(case: Case) -> Finding | None:
    """Return the checkpoint's blocks at the decisive moment, else at the peak of loading."""
    held, still = _twice(case, case.moment), True
    if not case.is_worth(held):
        moment = case.moment_of(_LOADING)
        held, still = ([] if moment is None else _twice(case, moment)), False
    if not case.is_worth(held):
        return None
    how = 'torch.load(..., map_location="cpu"), and del the checkpoint once it is loaded'
    rewrite = Rewrite("load through the host", "a copy at the start", how, case.without(held))
    when = "are still" if still and not case.death else "are"
    words = f"{{size}} of a checkpoint {when} on the GPU beside what they are loaded into{{at}}"
    return finding(case, "checkpoint-twice", words, held, rewrite, cause="loading")


def _twice(case: Case, moment: int) -> list[Allocation]:
    """Return blocks made by loading with the shape and dtype of parameters or states that are neither."""
    live = case.needed.live_at(moment)
    counts = Counter((a.shape, a.dtype) for a in live if a.category in _LOADED)
    found = []
    for a in live:
        if a.phase in _LOADING and a.category not in _LOADED and a.shape and counts[a.shape, a.dtype]:
            counts[a.shape, a.dtype] -= 1
            found.append(a)
    return found


def saving_on_gpu(case: Case) -> Finding | None:
    """Return the tensors that saving held at once; the largest of them is on the GPU in any case."""
    made = [a for a in case.live_in(_SAVING) if a.phase in _SAVING]
    if not case.is_worth(made):
        return None
    saved = [a for a in case.needed.allocations if a.phase in _SAVING]
    gathers = any(word in a.operator for a in saved for word in _SHARDED)
    largest = max(made, key=lambda a: a.block_bytes)
    what = "copies for a checkpoint are made"
    how = "tensor by tensor to the host: {name: value.cpu() for name, value in model.state_dict().items()}"
    if gathers:
        what = "a full state dict is gathered"
        how = "StateDictOptions(full_state_dict=True, cpu_offload=True), or save shards (torch.distributed.checkpoint)"
    kept = case.without(a for a in saved if a.index != largest.index)
    wasted = [a for a in made if a.index != largest.index]
    rewrite, words = Rewrite("save from the host", "a slower save", how, kept), what + " on the GPU, {size}{at}"
    return finding(case, "saving-on-gpu", words, made, rewrite, cause="saving", wasted=wasted)

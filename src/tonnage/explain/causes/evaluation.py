"""Evaluation that needs more than one batch does: outputs kept, graphs without a backward, and training leftovers.

Outputs are kept in a list (blocks of one line, alive together) or in one tensor that grows with every batch, as in the
transformers Trainer without `eval_accumulation_steps`. Without `no_grad`, the outputs of most modules are alive at
once.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

from tonnage.explain.case import Case
from tonnage.explain.fixes import Finding, finding
from tonnage.explain.rewriting import Rewrite, outside
from tonnage.ledger import Category
from tonnage.recording import Allocation

_EVALUATION = ("evaluation",)
_BATCHES = 3
_GRAPH_MODULES = 4
_GRAPH_SHARE = 0.5
_TRAINER = "transformers/trainer"
_Place = tuple[int, str, tuple[str, ...], str]  # evaluation number, module, stack, operator


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

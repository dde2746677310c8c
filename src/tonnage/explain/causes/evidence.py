"""Small rules that name no cause: tensors that are evidence beside one."""

from collections import Counter

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, Guilty, guilty_lines, lines_words, tensor_words
from tonnage.explain.fixes import Fix
from tonnage.explain.phases import is_worth
from tonnage.explain.rewrites import free_gradients
from tonnage.explain.words import trains
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.units import format_bytes

_SURPRISING_SHARE = 0.3
_TIMES_THE_NEXT = 4
_EXPECTED = (Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.EARLIER)
_FIRST_STEP_TIMES = 1.05
_VOCABULARY_AT_LEAST = 16384
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
_GRADIENTS_SHARE = 0.02
_GRAPH_SHARE = 0.1
_GRAPH_LINES = 4  # blocks of one line may be outputs kept on purpose


def surprising_tensor(case: Case) -> Finding | None:
    """Return the largest block, if it is a third of the total and far larger than the others."""
    others = [a for a in case.live if a.category not in _EXPECTED]
    if not others:
        return None
    ranked = sorted(others, key=lambda a: -a.block_bytes)
    largest = ranked[0]
    next_bytes = ranked[1].block_bytes if len(ranked) > 1 else 0
    if largest.block_bytes < max(_SURPRISING_SHARE * case.peak_bytes, _TIMES_THE_NEXT * next_bytes):
        return None
    size, words = largest.block_bytes, tensor_words(largest)
    share = 100 * size // case.peak_bytes
    at = f", at {largest.line}" if largest.line else ""
    sentence = f"one tensor is {share} % of all that was needed: {format_bytes(size)}, {words}{at}"
    return Finding("surprising-tensor", sentence, size, lines=(Guilty(largest.line, size, 1, words),))


def compile_peak(case: Case) -> Finding | None:
    """Return the excess of the first step over the largest later one, with what only the first had.

    Compilation, autotuning and algorithm search try out kernels.
    """
    steps = [step for step in case.recording.steps if step.step]
    if len(steps) < 2 or case.death:
        return None
    later = max(step.peak_allocated_bytes for step in steps[1:])
    excess = steps[0].peak_allocated_bytes - later
    if excess < (_FIRST_STEP_TIMES - 1) * later:
        return None
    once = [a for a in case.live if a.step == steps[0].step and a.died is not None]
    sentence = (
        f"the first step needed {format_bytes(excess)} more than any later one: kernels were tried out, or compiled"
    )
    how = "torch.backends.cudnn.benchmark=False, max_autotune=False, or one step with a small batch first"
    fix = Fix("no trials at full size", excess, "perhaps slower kernels", how)
    return Finding("first-step-peak", sentence, excess, lines=guilty_lines(once), fixes=(fix,))


def wide_logits(case: Case) -> Finding | None:
    """Return FP32 logits as wide as a vocabulary; the chunked loss is among the fixes tried on every recording."""
    wide = [a for a in case.live if _is_wide(a)]
    size = sum(a.block_bytes for a in wide)
    if not is_worth(case, size):
        return None
    lines = guilty_lines(wide)
    sentence = f"logits in float32 hold {format_bytes(size)}{lines_words(lines)}"
    return Finding("fp32-logits", sentence, size, lines=lines)


def _is_wide(a: Allocation) -> bool:
    shape = a.shape or ()
    batched = a.category not in _STATES
    return batched and a.dtype == "float32" and len(shape) > 1 and shape[-1] >= _VOCABULARY_AT_LEAST


def optimizer_temporaries(case: Case) -> Finding | None:
    """Return temporaries of an optimizer's step; a fused step is among the fixes tried on every recording."""
    temporaries = [a for a in case.live if a.phase == "optimizer" and a.category not in _STATES]
    size = sum(a.block_bytes for a in temporaries)
    if not is_worth(case, size):
        return None
    lines = guilty_lines(temporaries)
    sentence = f"the optimizer's step makes temporaries of {format_bytes(size)}{lines_words(lines)}"
    return Finding("optimizer-temporaries", sentence, size, lines=lines)


def kept_gradients(case: Case) -> Finding | None:
    """Return gradients alive in the forward after an optimizer step; freeing them is among the fixes tried."""
    freed = free_gradients(case.needed)
    if freed is None:
        return None
    # Freeing a gradient temporarily splits its lifetime in two.
    lives = Counter(a.index for a in freed.allocations)
    kept = [a for a in case.needed.allocations if lives[a.index] > 1]
    size = sum(a.block_bytes for a in kept)
    if size < _GRADIENTS_SHARE * case.peak_bytes:
        return None
    lines = guilty_lines(kept)
    sentence = f"gradients of {format_bytes(size)} stay through the next forward: zero_grad(set_to_none=False)"
    return Finding("kept-gradients", sentence, size, lines=lines)


def graph_without_backward(case: Case) -> Finding | None:
    """Return activations still alive at the end of a recording with forward passes only."""
    if case.recording.header.source != "snapshot" or case.death or trains(case.recording):
        return None
    kept = [a for a in case.live if a.category is Category.ACTIVATIONS and a.died is None]
    size = sum(a.block_bytes for a in kept)
    if size < _GRAPH_SHARE * case.peak_bytes or len({a.line for a in kept}) < _GRAPH_LINES:
        return None
    lines = guilty_lines(kept)
    sentence = (
        f"{format_bytes(size)} of activations are kept as for a backward, most{lines_words(lines)}, and the recording has "
        "none: if none is to come, with torch.inference_mode(): frees them"
    )
    return Finding("graph-without-backward", sentence, size, lines=lines)

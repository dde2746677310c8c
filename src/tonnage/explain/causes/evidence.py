"""Small rules that name no cause: tensors that are evidence beside one."""

from bisect import bisect_right
from collections import Counter, defaultdict
from math import prod

from tonnage.explain.case import Case
from tonnage.explain.fixes import Finding, Fix, Guilty, finding, guilty_lines, tensor_words
from tonnage.explain.rewrites import free_gradients
from tonnage.explain.rewriting import Rewrite
from tonnage.explain.source import Source
from tonnage.explain.words import is_of_sdpa, trains, words_for
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.recording.timeline import spans
from tonnage.techniques import change_of
from tonnage.units import MIB, format_bytes

_SURPRISING_SHARE = 0.3
_TIMES_THE_NEXT = 4
_EXPECTED = (Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.EARLIER)
_FIRST_STEP_TIMES = 1.05
_VOCABULARY_AT_LEAST = 16384
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
_GRADIENTS_SHARE = 0.02
_GRAPH_SHARE = 0.1
_GRAPH_LINES = 4  # blocks of one line may be outputs kept on purpose
_LONG = 512  # rows of an attention matrix
_VARYING_TURNS = 6
_DISTINCT_SHARE = 0.5
_UNUSED_SHARE = 0.15
_DDP = ("DistributedDataParallel", "DDP")


def surprising_tensor(case: Case) -> Finding | None:
    """Return the largest block, if it is a third of the total and far larger than the others."""
    ranked = sorted((a for a in case.live if a.category not in _EXPECTED), key=lambda a: -a.block_bytes)
    next_bytes = ranked[1].block_bytes if len(ranked) > 1 else 0
    if not ranked or ranked[0].block_bytes < max(_SURPRISING_SHARE * case.peak_bytes, _TIMES_THE_NEXT * next_bytes):
        return None
    largest = ranked[0]
    size, words = largest.block_bytes, tensor_words(largest)
    share = 100 * size // case.peak_bytes
    at = f", at {largest.line}" if largest.line else ""
    sentence = f"one tensor is {share} % of all that was needed: {format_bytes(size)}, {words}{at}"
    return Finding("surprising-tensor", sentence, size, lines=(Guilty(largest.line, size, 1, words),))


def compile_peak(case: Case) -> Finding | None:
    """Return the excess of the first step over the largest later one: compilation, autotuning and algorithm search."""
    steps = [step for step in case.recording.steps if step.step]
    if len(steps) < 2 or case.death:
        return None
    later = max(step.peak_allocated_bytes for step in steps[1:])
    excess = steps[0].peak_allocated_bytes - later
    if excess < (_FIRST_STEP_TIMES - 1) * later:
        return None
    once = [a for a in case.live if a.step == steps[0].step and a.died is not None]
    more = f"the first step needed {format_bytes(excess)} more than any later one"
    sentence = f"{more}: kernels were tried out, or compiled"
    how = "torch.backends.cudnn.benchmark=False, max_autotune=False, or one step with a small batch first"
    fix = Fix("no trials at full size", excess, "perhaps slower kernels", how)
    return Finding("first-step-peak", sentence, excess, lines=guilty_lines(once), fixes=(fix,))


def wide_logits(case: Case) -> Finding | None:
    """Return FP32 logits as wide as a vocabulary; the chunked loss is among the fixes tried on every recording."""
    batched = [a for a in case.live if a.category not in _STATES and a.dtype == "float32" and len(a.shape or ()) > 1]
    wide = [a for a in batched if a.shape and a.shape[-1] >= _VOCABULARY_AT_LEAST]
    return finding(case, "fp32-logits", "logits in float32 hold {size}{at}", wide) if case.is_worth(wide) else None


def attention_matrices(case: Case) -> Finding | None:
    """Return the bytes of quadratic masks and matrices, and what fused attention, which makes none, would save."""

    def matrices(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
        """Return count and length of the matrices: heads may be their own dimension or part of the first."""
        if not shape or len(shape) < 2 or not shape[-1] == shape[-2] >= _LONG:
            return None
        return prod(shape[:-2]), shape[-1]

    # Their last two dimensions are the same long length. A softmax over a square belongs to attention and gives the number
    # of heads: without it, images and hidden states that happen to be square would count.
    softmaxes = {matrices(a.shape) for a in case.needed.allocations if "softmax" in a.operator}

    def is_square(a: Allocation) -> bool:
        found = matrices(a.shape)
        if a.category in _STATES or found is None or not a.shape:
            return False
        is_mask = a.dtype == "bool" or (len(a.shape) == 4 and a.shape[1] == 1)
        return is_mask or found in softmaxes

    square = [a for a in case.live if is_square(a)]
    if not case.is_worth(square):
        return None
    length = max(a.shape[-1] for a in square if a.shape)
    words = f"attention matrices and masks of {length} × {length} hold {{size}}{{at}}"
    if any(map(is_of_sdpa, square)):  # SDPA is already used, but has no fused kernel for this dtype
        return finding(case, "attention-matrices", f"{words}: in 32 bits there is no fused kernel for it", square)
    by_model = case.needed.header.training.get("sdpa")
    how = words_for(case.needed, "fused-attention", "by_model" if by_model else "how")
    kept = [a for a in case.needed.allocations if not is_square(a)]
    return finding(case, "attention-matrices", words, square, Rewrite(*change_of("fused-attention"), how, kept))


def optimizer_temporaries(case: Case) -> Finding | None:
    """Return temporaries of an optimizer's step; a fused step is among the fixes tried on every recording."""
    temporaries = [a for a in case.live if a.phase == "optimizer" and a.category not in _STATES]
    if not case.is_worth(temporaries):
        return None
    words = "the optimizer's step makes temporaries of {size}{at}"
    return finding(case, "optimizer-temporaries", words, temporaries)


def kept_gradients(case: Case) -> Finding | None:
    """Return gradients alive in the forward after an optimizer step; freeing them is among the fixes tried."""
    freed = free_gradients(case.needed)
    if freed is None:
        return None
    # Freeing a gradient temporarily splits its lifetime in two.
    lives = Counter(a.index for a in freed.allocations)
    kept = [a for a in case.needed.allocations if lives[a.index] > 1]
    if not case.is_worth(kept, _GRADIENTS_SHARE):
        return None
    words = "gradients of {size} stay through the next forward: zero_grad(set_to_none=False)"
    return finding(case, "kept-gradients", words, kept)


def graph_without_backward(case: Case) -> Finding | None:
    """Return activations still alive at the end of a recording with forward passes only."""
    if case.recording.header.source != "snapshot" or case.death or trains(case.recording):
        return None
    kept = [a for a in case.live if a.category is Category.ACTIVATIONS and a.died is None]
    if not case.is_worth(kept, _GRAPH_SHARE) or len({a.line for a in kept}) < _GRAPH_LINES:
        return None
    words = "{size} of activations are kept as for a backward, most{at}, and the recording has none: if none is to come"
    return finding(case, "graph-without-backward", f"{words}, with torch.inference_mode(): frees them", kept)


def varying_lengths(case: Case) -> Finding | None:
    """Return the lines whose largest request varies with every iteration, if much of the reserved memory is unused."""
    largest: dict[str, Counter[int]] = defaultdict(Counter)
    for a in case.recording.allocations:
        if a.block_bytes >= MIB and (turn := bisect_right(case.turns, a.born)):
            largest[a.line][turn] = max(largest[a.line][turn], a.requested_bytes)
    lines = []
    for line, by_turn in largest.items():
        least, most, distinct = min(by_turn.values()), max(by_turn.values()), len(set(by_turn.values()))
        if len(by_turn) >= _VARYING_TURNS and distinct >= _DISTINCT_SHARE * len(by_turn):
            lines.append(Guilty(line, most, distinct, f"{format_bytes(least)} to {format_bytes(most)}"))
    lines.sort(key=lambda row: -row.size_bytes)
    unused = case.death.unused_bytes if case.death else case.recording.unused_at_peak_bytes
    if not lines or unused < _UNUSED_SHARE * case.recording.peak_reserved_bytes:
        return None
    sentence = f"requests vary from turn to turn ({lines[0].what} at {lines[0].line}), so freed blocks do not fit the next ones"
    return Finding("varying-lengths", sentence, unused, lines=tuple(lines[:3]))


def ddp_accumulation(case: Case) -> Finding | None:
    """Return the line that wraps a model in DistributedDataParallel, if it accumulates gradients without `no_sync`.

    Then every backward reduces them all. The script's text tells whether it wraps its model and uses `no_sync`; the
    recording tells how often backward runs in a step.
    """
    length = len(case.recording.timeline.allocated_bytes)
    phases = [name for name, _, _ in spans(case.recording.marks, "phase", length)]
    times = round(phases.count("backward") / max(1, phases.count("optimizer"))) if "optimizer" in phases else 0
    source = Source.find(case.recording.header.script) if times > 1 else None
    line = next(filter(None, map(source.mentions, _DDP)), None) if source else None
    if source is None or line is None or source.mentions("no_sync"):
        return None
    gradients = sum(a.block_bytes for a in case.live if a.category is Category.GRADIENTS)
    sentence = f"each of {times} backwards a step reduces all gradients: DistributedDataParallel without no_sync()"
    how = "with model.no_sync(): around all but the last backward"
    fix = Fix("no_sync while accumulating", 0, f"saves {times - 1} of {times} reductions a step", how)
    lines = (Guilty(f"{source.name}:{line}", gradients, 1, "wraps the model"),)
    return Finding("ddp-accumulation", sentence, gradients, lines=lines, fixes=(fix,))

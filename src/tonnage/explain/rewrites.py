"""A run's allocations as they would be after a change: one function per change.

Each returns None if the change does not apply (already made, nothing to gain, not in this run). `explain.fixes`
determines whether it saves anything.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tonnage.explain.blocks import checkpoint_blocks
from tonnage.explain.precision import autocast, half_weights
from tonnage.explain.rewriting import Rewrite, outside, resized, spans_of
from tonnage.explain.words import (
    batch_flag,
    batch_of,
    batch_words,
    eight_bit_words,
    fused_words,
    has_words,
    trains,
    words_for,
)
from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording
from tonnage.techniques import change_of

_BATCHED = {Category.ACTIVATIONS, Category.INPUTS, Category.KV_CACHE}
_VOCABULARY_AT_LEAST = 16384
_LOSS_CHUNKS = 8
_WORTH_HALVING_SHARE = 0.1
_SMALL_STATE_ELEMENTS = 4096
_STATE_BLOCK = 256  # elements that share a scale of four bytes
_BYTES_PER_STATE = {"float32": 4, "bfloat16": 2, "float16": 2}
_PREDICTIONS = "transformers/trainer_pt_utils.py"


def halve_batch(recording: Recording) -> Rewrite | None:
    """Halve the batch and what was computed from it. Training accumulates the gradients of both halves."""
    flag, batch, peak = batch_flag(recording), batch_of(recording), recording.timeline.peak_sequence
    phases = [mark.name for mark in recording.marks if mark.kind == "phase" and mark.sequence <= peak]
    is_of_evaluation = trains(recording) and phases[-1:] == ["evaluation"]
    if is_of_evaluation:
        told = recording.header.training.get("eval_batch", "")
        batch = int(told) if told.isdigit() else batch
    batched = sum(a.block_bytes for a in recording.live_at_peak if a.category in _BATCHED)
    if (batch is not None and batch < 2) or batched < _WORTH_HALVING_SHARE * recording.peak_allocated_bytes:
        return None
    is_batched = _batch_test(recording, batch)
    share = (batch // 2) / batch if batch else 0.5
    if is_of_evaluation:
        # Kept predictions cover the whole evaluation, whatever the batch.
        has_own = has_words(recording, "micro-batches", "evaluation")
        if batch is None or not has_own or any(map(_is_prediction, recording.live_at_peak)):
            return None
        halved = resized(recording, lambda a: share if a.phase == "evaluation" and is_batched(a) else 1.0)
        how = words_for(recording, "micro-batches", "evaluation", half=batch // 2)
        return Rewrite("half the batch of evaluation", "more of its steps", how, halved)
    halved = resized(recording, lambda a: share if is_batched(a) else 1.0)
    if flag is not None:
        return Rewrite(*change_of("micro-batches"), flag, halved)
    if trains(recording) and recording.header.training.get("stepping", "1") == "1":
        # Gradients live from the first half's backward on, beside those of the second until they are added.
        starts = [start for start, _ in spans_of(recording, "forward")]
        alone, halved = halved, []
        for a in alone:
            place = bisect_right(starts, a.born) - 1
            if a.category is not Category.GRADIENTS or place < 0 or a.phase != "backward":
                halved.append(a)
            else:
                halved += [replace(a, born=starts[place]), replace(a, index=-1 - a.index, died=a.born + 1)]
    change, costs = change_of("micro-batches")
    how = batch_words(recording, batch)
    return Rewrite(change, costs if trains(recording) else "twice the calls", how, halved)


def _batch_test(recording: Recording, batch: int | None) -> Callable[[Allocation], bool]:
    """Return a test whether a block depends on the batch: not if it predates the first step or has a weight's size."""
    parameters = (a.shape for a in recording.allocations if a.category is Category.PARAMETERS)
    weights = {tuple(sorted(shape)) for shape in parameters if shape and len(shape) > 1}

    def is_batched(a: Allocation) -> bool:
        if a.category is Category.WORKSPACE and "conv" in a.operator:
            return True  # cuDNN's are mostly images in another memory format
        if a.category not in _BATCHED or a.phase == "setup":
            return False
        if batch is None or not a.shape:
            return True
        if a.category is Category.ACTIVATIONS and tuple(sorted(a.shape)) in weights:
            return False
        return any(extent % batch == 0 for extent in a.shape[:2])

    return is_batched


def chunk_loss(recording: Recording) -> Rewrite | None:
    """Compute the loss over chunks of tokens, so that vocabulary-wide tensors exist one chunk at a time."""
    if not trains(recording) and recording.header.outcome != "oom":
        return None
    # The width with most bytes at the peak, if a weight of that many rows makes it from tokens.
    weights = [a.shape for a in recording.allocations if a.category is Category.PARAMETERS and a.shape]
    inputs = [a for a in recording.allocations if a.category is Category.INPUTS and a.dtype in ("int64", "int32")]
    bytes_by_width: Counter[int] = Counter()
    for a in recording.live_at_peak:
        if a.category is Category.ACTIVATIONS and a.shape and len(a.shape) > 1 and a.shape[-1] >= _VOCABULARY_AT_LEAST:
            bytes_by_width[a.shape[-1]] += a.block_bytes
    width = max(bytes_by_width, key=bytes_by_width.__getitem__, default=None)
    if width not in {shape[0] for shape in weights if len(shape) == 2} or all(len(a.shape or ()) < 2 for a in inputs):
        return None
    made = (Category.ACTIVATIONS, Category.WORKSPACE, Category.OTHER)

    def share_of(a: Allocation) -> float:
        # Logits and what derives from them; not the projection's weight or gradient.
        is_wide = a.shape is not None and len(a.shape) > 1 and a.shape[-1] == width
        return 1 / _LOSS_CHUNKS if is_wide and a.category in made and a.phase != "evaluation" else 1.0

    wide = resized(recording, share_of)
    return Rewrite(*change_of("chunked-loss"), words_for(recording, "chunked-loss", chunks=_LOSS_CHUNKS), wide)


def fuse_optimizer(recording: Recording) -> Rewrite | None:
    """Fuse the optimizer step, which then makes no temporary lists; foreach makes state-sized ones."""
    kept, how = [a for a in recording.allocations if not _is_foreach_temporary(a)], fused_words(recording)
    if how is None or len(kept) == len(recording.allocations):
        return None
    return Rewrite(*change_of("fused-optimizer"), how, kept)


def _is_foreach_temporary(a: Allocation) -> bool:
    stateful = a.category in (Category.OPTIMIZER_STATES, Category.PARAMETERS)
    return a.phase == "optimizer" and "_foreach" in a.operator and not stateful


def eight_bit_states(recording: Recording) -> Rewrite | None:
    """Keep optimizer states in 8 bits, one parameter at a time; small ones stay as they are."""
    # The transformers Trainer excludes embedding tables. Another weight may be as large as a table: of each shape, the two
    # states of each table are excluded.
    facts = recording.header.training
    own = has_words(recording, "eight-bit-states") and "arguments" in facts
    tables = Counter(facts.get("embeddings", "").split() if own else ())
    left = Counter({tuple(map(int, table.split("x"))): 2 * count for table, count in tables.items()})
    spared = set()
    for a in recording.allocations:
        if a.category is Category.OPTIMIZER_STATES and a.shape is not None and left[a.shape] > 0:
            left[a.shape] -= 1
            spared.add(a.index)

    def share_of(a: Allocation) -> float:
        width = _BYTES_PER_STATE.get(a.dtype, 1)
        is_small = a.requested_bytes < width * _SMALL_STATE_ELEMENTS
        if a.category is not Category.OPTIMIZER_STATES or width == 1 or is_small or a.index in spared:
            return 1.0
        return (1 + 4 / _STATE_BLOCK) / width

    how = eight_bit_words(recording)
    if how is None or not any(share_of(a) < 1 for a in recording.allocations):
        return None
    smaller = [a for a in resized(recording, share_of) if not _is_foreach_temporary(a)]
    if "torchao" in how:
        # It unpacks both states of one parameter at a time; bitsandbytes works in place.
        largest = max((a for a in recording.allocations if share_of(a) < 1), key=lambda a: a.block_bytes)
        smaller += [
            replace(largest, index=-number - 2 * start, born=start, died=max(end, start + 1))
            for start, end in spans_of(recording, "optimizer")
            for number in (1, 2)
        ]
    return Rewrite(*change_of("eight-bit-states"), how, smaller)


def free_gradients(recording: Recording) -> Rewrite | None:
    """Free gradients in the forward after an optimizer step, and allocate them again after it."""
    steps, backwards = ([-1, *(start for start, _ in spans_of(recording, name))] for name in ("optimizer", "backward"))
    gaps = []
    for start, end in spans_of(recording, "forward"):
        if steps[bisect_right(steps, start) - 1] > backwards[bisect_right(backwards, start) - 1]:
            gaps.append((start, end))
    # What backward made after each gap, by shape, to add to an existing gradient: it takes the gradient's place.
    births: dict[tuple[int, tuple[int, ...] | None], list[Allocation]] = defaultdict(list)
    ends = [end for _, end in gaps]
    for a in recording.allocations:
        gap = bisect_right(ends, a.born) - 1
        if gap >= 0 and a.phase == "backward" and a.category is not Category.GRADIENTS:
            births[gap, a.shape].append(a)
    split, replaced, late = [], set[int](), False

    def made_again(shape: tuple[int, ...] | None, gap: int) -> int | None:
        made = births[gap, shape].pop(0) if births[gap, shape] else None
        replaced.update([made.index] if made else [])
        return made.born if made else None

    for a in recording.allocations:
        if a.category is not Category.GRADIENTS:
            split.append(a)
            continue
        split += outside(a, gaps, partial(made_again, a.shape))
        # A gradient that is freed during a forward or right after it is freed too late.
        late = late or any(a.born < start and a.died is not None and start < a.died <= end for start, end in gaps)
    if split == recording.allocations:
        return None
    how = words_for(recording, "free-gradients", "early" if late else "how")
    return Rewrite(*change_of("free-gradients"), how, [a for a in split if a.index not in replaced])


def predictions_on_host(recording: Recording) -> Rewrite | None:
    """Move predictions that the transformers Trainer gathers in evaluation to the host after each of its steps."""
    gathered = {a.index for a in recording.allocations if _is_prediction(a)}
    if not gathered or not has_words(recording, "host-predictions"):
        return None
    kept = [a for a in recording.allocations if a.index not in gathered]
    return Rewrite(*change_of("host-predictions"), words_for(recording, "host-predictions"), kept)


def _is_prediction(a: Allocation) -> bool:
    return any(frame.startswith(_PREDICTIONS) for frame in a.stack)


REWRITES: tuple[Callable[[Recording], Rewrite | None], ...] = (
    *(halve_batch, checkpoint_blocks, chunk_loss, autocast, half_weights),
    *(fuse_optimizer, free_gradients, eight_bit_states, predictions_on_host),
)

"""A run's allocations as they would be after a change: one function per change.

Each returns None if the change does not apply (already made, nothing to gain, not in this run). `explain.fixes`
determines whether it saves anything.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from tonnage.explain.blocks import checkpoint_blocks
from tonnage.explain.precision import autocast, half_weights
from tonnage.explain.rewriting import Rewrite, resized, spans_of
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
    flag = batch_flag(recording)
    batch = batch_of(recording)
    peak = recording.timeline.peak_sequence
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
        return Rewrite(*change_of("micro-batches"), flag[0], halved)
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
    weights = {
        _extents(a) for a in recording.allocations if a.category is Category.PARAMETERS and len(a.shape or ()) > 1
    }

    def is_batched(a: Allocation) -> bool:
        if a.category is Category.WORKSPACE and "conv" in a.operator:
            return True  # cuDNN's are mostly images in another memory format
        if a.category not in _BATCHED or a.phase == "setup":
            return False
        if batch is None or not a.shape:
            return True
        if _extents(a) in weights and a.category is Category.ACTIVATIONS:
            return False
        return any(extent % batch == 0 for extent in a.shape[:2])

    return is_batched


def _extents(a: Allocation) -> tuple[int, ...]:
    return tuple(sorted(a.shape or ()))


def chunk_loss(recording: Recording) -> Rewrite | None:
    """Compute the loss over chunks of tokens, so that vocabulary-wide tensors exist one chunk at a time."""
    width = _vocabulary(recording) if trains(recording) or recording.header.outcome == "oom" else None
    if width is None:
        return None
    made = (Category.ACTIVATIONS, Category.WORKSPACE, Category.OTHER)

    def share_of(a: Allocation) -> float:
        # Logits and what derives from them; not the projection's weight or gradient.
        is_wide = a.shape is not None and len(a.shape) > 1 and a.shape[-1] == width
        return 1 / _LOSS_CHUNKS if is_wide and a.category in made and a.phase != "evaluation" else 1.0

    wide = resized(recording, share_of)
    return Rewrite(*change_of("chunked-loss"), words_for(recording, "chunked-loss", chunks=_LOSS_CHUNKS), wide)


def _vocabulary(recording: Recording) -> int | None:
    """Return the width with most bytes at the peak, if a weight of that many rows makes it from tokens."""
    rows = {
        a.shape[0]
        for a in recording.allocations
        if a.category is Category.PARAMETERS and len(a.shape or ()) == 2 and a.shape
    }
    tokens = any(
        a.category is Category.INPUTS and a.dtype in ("int64", "int32") and len(a.shape or ()) > 1
        for a in recording.allocations
    )
    bytes_by_width: dict[int, int] = {}
    for a in recording.live_at_peak:
        if a.category is Category.ACTIVATIONS and a.shape and len(a.shape) > 1 and a.shape[-1] >= _VOCABULARY_AT_LEAST:
            bytes_by_width[a.shape[-1]] = bytes_by_width.get(a.shape[-1], 0) + a.block_bytes
    width = max(bytes_by_width, key=bytes_by_width.__getitem__, default=None)
    return width if tokens and width in rows else None


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
    how = eight_bit_words(recording)
    share_of = _state_test(recording)
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


def _state_test(recording: Recording) -> Callable[[Allocation], float]:
    """Return what share of a state is left. The transformers Trainer excludes embedding tables."""
    facts = recording.header.training
    tables = (
        facts.get("embeddings", "").split() if has_words(recording, "eight-bit-states") and "arguments" in facts else []
    )
    # Another weight may be as large as a table: of each shape, the two states of each table are excluded.
    left = Counter({tuple(map(int, table.split("x"))): 2 * count for table, count in Counter(tables).items()})
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

    return share_of


def free_gradients(recording: Recording) -> Rewrite | None:
    """Free gradients in the forward after an optimizer step, and allocate them again after it."""
    steps = [start for start, _ in spans_of(recording, "optimizer")]
    backwards = [start for start, _ in spans_of(recording, "backward")]
    forwards = spans_of(recording, "forward")
    gaps = [(start, end) for start, end in forwards if _last_before(steps, start) > _last_before(backwards, start)]
    # What backward made after each gap, by shape, to add to an existing gradient.
    births: _Births = {}
    ends = [end for _, end in gaps]
    for a in recording.allocations:
        gap = bisect_right(ends, a.born) - 1
        if gap >= 0 and a.phase == "backward" and a.category is not Category.GRADIENTS:
            births.setdefault((gap, a.shape), []).append(a)
    replaced: set[int] = set()
    split = [part for a in recording.allocations for part in _without(a, gaps, births, replaced)]
    if split == recording.allocations:
        return None
    split = [a for a in split if a.index not in replaced]
    # Whether a gradient is freed during a forward or right after it, which is too late.
    late = any(
        a.born < start and a.died is not None and start < a.died <= end
        for a in recording.allocations
        if a.category is Category.GRADIENTS
        for start, end in gaps
    )
    how = words_for(recording, "free-gradients", "early" if late else "how")
    return Rewrite(*change_of("free-gradients"), how, split)


def _last_before(starts: list[int], moment: int) -> int:
    position = bisect_right(starts, moment)
    return starts[position - 1] if position else -1


_Births = dict[tuple[int, tuple[int, ...] | None], list[Allocation]]


def _without(a: Allocation, gaps: list[tuple[int, int]], births: _Births, replaced: set[int]) -> Iterator[Allocation]:
    """Yield a gradient's lifetimes outside the gaps; what would have been added to it takes its place."""
    born = a.born
    for number, (start, end) in enumerate(gaps if a.category is Category.GRADIENTS else ()):
        if born >= start or (a.died is not None and a.died <= start):
            continue
        yield replace(a, born=born, died=start)
        made = births.get((number, a.shape), [])
        if made:
            replaced.add(made[0].index)
        born = made.pop(0).born if made else end
        if a.died is not None and a.died <= max(born, end):
            return
    yield a if born == a.born else replace(a, born=born)


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

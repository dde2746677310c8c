"""A run's allocations as they would be after a change: one function per change.

Each returns None if the change does not apply (already made, nothing to gain, not in this run). `explain.fixes`
determines whether it saves anything.

Repeated blocks can be recomputed in backward. A block is a numbered module that keeps more than its output. If the
outermost ones are stages of different sizes, as in most vision models, the blocks are the numbered modules inside them.
If a library marks the layers it can recompute, those are used.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tonnage.explain.precision import autocast, half_weights
from tonnage.explain.rewriting import Rewrite, outside, resized, spans_of
from tonnage.explain.words import (
    batch_flag,
    batch_of,
    batch_words,
    checkpoint_words,
    eight_bit_words,
    has_words,
    optimizers_of,
    trains,
    words_for,
)
from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording, module_pattern
from tonnage.techniques import change_of, techniques

_BATCHED = {Category.ACTIVATIONS, Category.INPUTS, Category.KV_CACHE}
_VOCABULARY_AT_LEAST = 16384
_LOSS_CHUNKS = 8
_WORTH_HALVING_SHARE = 0.1
_SMALL_STATE_ELEMENTS = 4096
_STATE_BLOCK = 256  # elements that share a scale of four bytes
_BYTES_PER_STATE = {"float32": 4, "bfloat16": 2, "float16": 2}
_PREDICTIONS = "transformers/trainer_pt_utils.py"
# Matches a path up to each of its numbers: "layers.7" and "layers.7.experts.3" of "layers.7.experts.3.up".
_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_TINY_SHARE = 1 / 64  # of a block's largest tensor: norm statistics, RNG states
_COVERED_SHARE = 0.5
_STAGES_DIFFER = 1.5
_PREFIXES = 4
_Made = dict[tuple[int, str], list[Allocation]]  # by forward pass and the block that made them


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
    kept, names = [a for a in recording.allocations if not _is_foreach_temporary(a)], optimizers_of(recording)
    known = techniques()["fused-optimizer"]["optimizers"]
    if len(kept) == len(recording.allocations) or any(name not in known for name in names):
        return None
    how = words_for(recording, "fused-optimizer", optimizer=names[0]) if names else "fused=True in the optimizer"
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


def checkpoint_blocks(recording: Recording) -> Rewrite | None:
    """Recompute each repeated block in backward: only its output is kept until its backward runs."""
    ends = [end for _, end in spans_of(recording, "forward")]
    parts: dict[int, list[Allocation]] = {}
    blocks: set[str] = set()
    for (number, block), made in _made_by_block(recording).items():
        saved = [a for a in made if a.died is None or a.died >= ends[number]]
        if _is_whole(block, saved):
            blocks.add(block)
            # Beside a huge index or mask nothing else may count: then the last saved tensor is the output.
            parts |= _recomputed(saved, (_large(made) or _large(saved))[-1])
    if len(blocks) < 2:
        return None
    changed = [part for a in recording.allocations for part in parts.get(a.index, [a])]
    return Rewrite(*change_of("recompute", count=len(blocks)), checkpoint_words(recording, _names(blocks)), changed)


def _recomputed(saved: list[Allocation], output: Allocation) -> dict[int, list[Allocation]]:
    """Give saved tensors two lives: in the block's forward, and from its backward on. The output lives until then."""
    again = min((a.died for a in saved if a.died is not None), default=None)
    parts = {}
    for a in saved:
        parts[a.index] = [replace(a, died=output.born + 1)] if a.born <= output.born else []
        if again is not None and a.died is not None and a.died > again:
            parts[a.index].append(replace(a, born=again))
    parts[output.index] = [output]
    if output.died is not None and (again is None or output.died < again):
        parts[output.index] = [replace(output, died=again)]
    return parts


def _is_whole(block: str, members: list[Allocation]) -> bool:
    """Say whether it has submodules and keeps several tensors: a single layer, however often called, is no block."""
    if not members or all(a.module == block for a in members):
        return False
    return len({(a.module, a.operator) for a in _large(members)}) > 1


def _large(members: list[Allocation]) -> list[Allocation]:
    """Return the tensors that count, in order; masks and indices are not outputs."""
    least = _TINY_SHARE * max(a.block_bytes for a in members)
    return [a for a in members if a.block_bytes >= least and (not a.dtype or "float" in a.dtype)]


def _made_by_block(recording: Recording) -> _Made:
    """Return activations of each forward pass, by the block that made them."""
    starts = [start for start, _ in spans_of(recording, "forward")]
    kept: list[tuple[int, Allocation]] = []
    for a in recording.allocations:
        number = bisect_right(starts, a.born) - 1
        if a.category is Category.ACTIVATIONS and a.phase == "forward" and number >= 0:
            kept.append((number, a))
    found: _Made = {}
    if named := recording.header.training.get("recomputed", ""):
        # Group by the layers that the model's library can recompute, using the outermost if they are nested.
        own = set(named.split("\n"))
        for number, a in kept:
            path = a.module.split(".")
            heads = (".".join(path[:length]) for length in range(1, len(path) + 1))
            if block := next((head for head in heads if head in own), None):
                found.setdefault((number, block), []).append(a)
        return found
    outer = _at_depth(kept, 0)
    sizes = {sum(a.block_bytes for a in members) for members in outer.values()}
    if not sizes or max(sizes) < _STAGES_DIFFER * min(sizes):
        return outer
    # Split up stages that consist of whole blocks.
    for key, members in outer.items():
        inner = _at_depth([(key[0], a) for a in members], 1)
        whole = {key: blocks for key, blocks in inner.items() if _is_whole(key[1], blocks)}
        covered = sum(a.block_bytes for blocks in whole.values() for a in blocks)
        is_stage = len(whole) > 1 and covered >= _COVERED_SHARE * sum(a.block_bytes for a in members)
        found |= whole if is_stage else {key: members}
    return found


def _at_depth(kept: list[tuple[int, Allocation]], depth: int) -> _Made:
    """Group by the path up to the first or the second number."""
    found: _Made = {}
    for number, a in kept:
        places = list(_NUMBERED.finditer(a.module))
        if len(places) > depth:
            found.setdefault((number, a.module[: places[depth].end()]), []).append(a)
    return found


def _names(blocks: set[str]) -> str:
    """Format the block lists like "layer1.*, layer2.* and layer3.*", or the first few."""

    def in_order(block: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in block.split(".")]

    patterns = list(dict.fromkeys(map(module_pattern, sorted(blocks, key=in_order))))
    # Several stages may share a pattern, as in "stages.*.blocks.*"; an uninformative one is left out.
    if len(patterns) == 1:
        return "block" if patterns == ["*"] else patterns[0]
    shown, rest = patterns[:_PREFIXES], len(patterns[_PREFIXES:])
    last = f"{rest} more" if rest else shown.pop()
    return f"{', '.join(shown)} and {last}"


REWRITES: tuple[Callable[[Recording], Rewrite | None], ...] = (
    *(halve_batch, checkpoint_blocks, chunk_loss, autocast, half_weights),
    *(fuse_optimizer, free_gradients, eight_bit_states, predictions_on_host),
)

"""A run's allocations as they would be after a change: one function a change.

A rewrite changes sizes and lifetimes and leaves the order of events alone. It answers None where the change does not
apply (already made, nothing to gain). Whether it saves anything is for `explain.fixes` to find out.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording, module_pattern
from tonnage.recording.timeline import spans

_BATCH_FLAG = re.compile(r"--?[\w-]*(batch|bs|bsz)[\w-]*", re.IGNORECASE)
# The outermost numbered module: "layers" and a number, whatever follows.
_BLOCK = re.compile(r"(?:[^\d.][^.]*\.)*\d+(?=\.|$)")
_BATCHED = {Category.ACTIVATIONS, Category.INPUTS, Category.KV_CACHE}
_VOCABULARY_AT_LEAST = 16384
_LOSS_CHUNKS = 8
_WORTH_HALVING_SHARE = 0.1
_SMALL_STATE_ELEMENTS = 4096
_BYTES_PER_STATE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Operators whose results autocast makes in 16 bits, and pointwise ones that follow their input.
_AUTOCAST_16_BIT = re.compile(
    r"linear|mm$|matmul|conv|attention|gelu|silu|relu|dropout|native_dropout|_unsafe_view|clone|mul$|cat$"
)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A change in words, and the allocations after it."""

    change: str
    costs: str
    how: str
    allocations: list[Allocation]


def halve_batch(recording: Recording) -> Rewrite | None:
    """Half the batch: half of what was computed from it."""
    inputs = [a.shape for a in recording.allocations if a.category is Category.INPUTS and a.shape]
    if inputs and max(shape[0] for shape in inputs) < 2:
        return None
    batched = sum(a.block_bytes for a in recording.live_at_peak if a.category in _BATCHED)
    if batched < _WORTH_HALVING_SHARE * recording.peak_allocated_bytes:
        return None
    halved = resized(recording, lambda a: 0.5 if a.category in _BATCHED else 1.0)
    return Rewrite("half the batch", "twice the steps", _batch_words(recording), halved)


def _batch_words(recording: Recording) -> str:
    """The script's own flag with half its value, where it has one."""
    arguments = recording.header.arguments
    for flag, value in pairwise(arguments):
        if _BATCH_FLAG.fullmatch(flag) and value.isdigit() and int(value) > 1:
            return f"{flag} {int(value) // 2}"
    for word in arguments:
        flag, _, value = word.partition("=")
        if _BATCH_FLAG.fullmatch(flag) and value.isdigit() and int(value) > 1:
            return f"{flag}={int(value) // 2}"
    trains = recording.header.outcome == "oom" or any(mark.name == "backward" for mark in recording.marks)
    return "and accumulate gradients over two" if trains else "two calls of half the size"


def checkpoint_blocks(recording: Recording) -> Rewrite | None:
    """Recompute each repeated block in backward: only its output is kept, and one block at a time is whole."""
    saved = _saved_by_block(recording)
    blocks = {block for _, block in saved}
    dropped = [a for members in saved.values() for a in members[:-1]]
    if len(blocks) < 2 or not dropped:
        return None
    gone = {a.index for a in dropped}
    kept = [a for a in recording.allocations if a.index not in gone]
    how = f"torch.utils.checkpoint on each {module_pattern(min(blocks))}"
    return Rewrite(f"recompute {len(blocks)} blocks", "one more forward", how, [*kept, *_whole_blocks(saved)])


def _whole_blocks(saved: dict[tuple[int, str], list[Allocation]]) -> Iterator[Allocation]:
    """The block that is whole at a time: while the blocks run forward, and while they run backward."""
    for number in {number for number, _ in saved}:
        blocks = [members for (forward, _), members in saved.items() if forward == number]
        dropped = [a for members in blocks for a in members[:-1]]
        size_bytes = max(sum(a.block_bytes for a in members) for members in blocks)
        deaths = [a.died for a in dropped if a.died is not None]
        for moments in ([a.born for a in dropped], deaths):
            if moments:
                born = min(moments)
                died = max(born + 1, *moments)
                yield replace(dropped[0], block_bytes=size_bytes, requested_bytes=size_bytes, born=born, died=died)


def _saved_by_block(recording: Recording) -> dict[tuple[int, str], list[Allocation]]:
    """Activations that outlive their forward, by that forward and the block ("layers.7") that made them."""
    forwards = list(_spans(recording, "forward"))
    starts = [start for start, _ in forwards]
    saved: dict[tuple[int, str], list[Allocation]] = {}
    for a in recording.allocations:
        block = _BLOCK.match(a.module) if a.category is Category.ACTIVATIONS and a.phase == "forward" else None
        number = bisect_right(starts, a.born) - 1
        if block and number >= 0 and (a.died is None or a.died >= forwards[number][1]):
            saved.setdefault((number, block[0]), []).append(a)
    return saved


def _spans(recording: Recording, phase: str) -> Iterator[tuple[int, int]]:
    """(first event, event after the last) of each turn of a phase."""
    turns = spans(recording.marks, "phase", len(recording.timeline.allocated_bytes))
    return ((start, end) for name, start, end in turns if name == phase)


def chunk_loss(recording: Recording) -> Rewrite | None:
    """The loss over chunks of tokens: tensors as wide as the vocabulary exist one chunk at a time."""
    width = _vocabulary(recording)
    if width is None:
        return None
    wide = resized(recording, lambda a: 1 / _LOSS_CHUNKS if _is_wide(a, width) else 1.0)
    how = f"project and take the loss in {_LOSS_CHUNKS} chunks of tokens"
    return Rewrite("chunked loss", "about 1 % time", how, wide)


def _is_wide(a: Allocation, width: int) -> bool:
    """Logits and what is computed from them; not the weight of the projection itself nor its gradient."""
    batched = a.category in (Category.ACTIVATIONS, Category.WORKSPACE, Category.OTHER)
    return batched and a.shape is not None and len(a.shape) > 1 and a.shape[-1] == width


def _vocabulary(recording: Recording) -> int | None:
    """The last dimension, if one is as wide as a vocabulary, that most bytes at the peak have."""
    bytes_by_width: dict[int, int] = {}
    for a in recording.live_at_peak:
        if a.category is Category.ACTIVATIONS and a.shape and len(a.shape) > 1 and a.shape[-1] >= _VOCABULARY_AT_LEAST:
            bytes_by_width[a.shape[-1]] = bytes_by_width.get(a.shape[-1], 0) + a.block_bytes
    return max(bytes_by_width, key=bytes_by_width.__getitem__, default=None)


def autocast(recording: Recording) -> Rewrite | None:
    """Matrix products in bfloat16, where activations are in float32 throughout; weights get a 16-bit copy."""
    floats = [a for a in recording.live_at_peak if a.category is Category.ACTIVATIONS and "float" in a.dtype]
    if not floats or any(a.dtype != "float32" for a in floats):
        return None
    lowered = resized(recording, lambda a: 0.5 if _becomes_16_bit(a) else 1.0)
    weights = [
        a for a in lowered if a.category is Category.PARAMETERS and a.dtype == "float32" and len(a.shape or ()) > 1
    ]
    copies = [replace(_scaled(a, 0.5), index=-1 - a.index) for a in weights]
    how = 'torch.autocast("cuda", dtype=torch.bfloat16)'
    return Rewrite("autocast to bfloat16", "less precision", how, [*lowered, *copies])


def _becomes_16_bit(a: Allocation) -> bool:
    return a.category is Category.ACTIVATIONS and a.dtype == "float32" and bool(_AUTOCAST_16_BIT.search(a.operator))


def fuse_optimizer(recording: Recording) -> Rewrite | None:
    """A fused step makes no temporary lists; the foreach step makes state-sized ones."""
    kept = [a for a in recording.allocations if not _is_foreach_temporary(a)]
    if len(kept) == len(recording.allocations):
        return None
    return Rewrite("fused optimizer", "nothing", "fused=True in the optimizer", kept)


def _is_foreach_temporary(a: Allocation) -> bool:
    stateful = a.category in (Category.OPTIMIZER_STATES, Category.PARAMETERS)
    return a.phase == "optimizer" and "_foreach" in a.operator and not stateful


def eight_bit_states(recording: Recording) -> Rewrite | None:
    """Optimizer states in 8 bits; small ones stay as they are."""
    if not any(_state_share(a) < 1 for a in recording.allocations):
        return None
    smaller = resized(recording, _state_share)
    return Rewrite("8-bit optimizer states", "other numerics", "torchao.optim.AdamW8bit", smaller)


def _state_share(a: Allocation) -> float:
    if a.category is not Category.OPTIMIZER_STATES:
        return 1.0
    width = _BYTES_PER_STATE.get(a.dtype, 1)
    return 1 / width if a.requested_bytes >= width * _SMALL_STATE_ELEMENTS else 1.0


def free_gradients(recording: Recording) -> Rewrite | None:
    """`zero_grad(set_to_none=True)`: no gradients while the forward after an optimizer step runs."""
    steps = [start for start, _ in _spans(recording, "optimizer")]
    backwards = [start for start, _ in _spans(recording, "backward")]
    forwards = _spans(recording, "forward")
    gaps = [(start, end) for start, end in forwards if _last_before(steps, start) > _last_before(backwards, start)]
    split = [part for a in recording.allocations for part in _without(a, gaps)]
    if len(split) == len(recording.allocations):
        return None
    return Rewrite("free gradients between steps", "nothing", "optimizer.zero_grad(set_to_none=True)", split)


def _last_before(starts: list[int], moment: int) -> int:
    position = bisect_right(starts, moment)
    return starts[position - 1] if position else -1


def _without(a: Allocation, gaps: list[tuple[int, int]]) -> Iterator[Allocation]:
    """A gradient in parts, each of them outside the gaps."""
    born = a.born
    if a.category is Category.GRADIENTS:
        for start, end in gaps:
            if born < start and (a.died is None or a.died > end):
                yield replace(a, born=born, died=start)
                born = end
    yield a if born == a.born else replace(a, born=born)


def resized(recording: Recording, share_of: Callable[[Allocation], float]) -> list[Allocation]:
    """The allocations, each at its share of its size."""
    return [_scaled(a, share) if (share := share_of(a)) != 1.0 else a for a in recording.allocations]


def _scaled(a: Allocation, share: float) -> Allocation:
    return replace(
        a, block_bytes=_rounded(a.block_bytes * share), requested_bytes=max(1, int(a.requested_bytes * share))
    )


def _rounded(size_bytes: float) -> int:
    return max(512, -(-int(size_bytes) // 512) * 512)


REWRITES: tuple[Callable[[Recording], Rewrite | None], ...] = (
    halve_batch,
    checkpoint_blocks,
    chunk_loss,
    autocast,
    fuse_optimizer,
    free_gradients,
    eight_bit_states,
)

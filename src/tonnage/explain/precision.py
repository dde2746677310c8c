"""What 16 bits would save in an FP32 run: autocast for training, 16-bit weights for inference.

Autocast decides by operator: products return 16 bits, norms and losses 32, and other operators follow their inputs. So
the forward pass is walked through in order, and each result gets the dtype it would have. A product saves a 16-bit copy
of its input instead of the input, one per product; weights get a copy that lives until backward has used it.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tonnage.explain.rewriting import Rewrite, resized, scaled, spans_of
from tonnage.explain.words import half_type, is_of_sdpa, trains, words_for
from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording
from tonnage.techniques import change_of

# torch.amp's lists, for operators whose results are saved.
_PRODUCT = re.compile(r"linear|mm$|matmul|conv|attention|rnn|lstm|gru|einsum")
_FULL = re.compile(
    r"layer_norm|group_norm|softmax|nll|loss|pow|exp$|^log|rsqrt|reciprocal|^norm|linalg|cumsum|cumprod|prod|sum$|softplus|"
    r"upsample|embedding|index_select|_to_copy"
)
_KEEPS_ITS_INPUT = re.compile(r"layer_norm|group_norm|pow")
_KEEPS_ITS_RESULT = re.compile(r"softmax|exp|rsqrt|tanh|sigmoid|relu")
_OF_TWO = re.compile(r"^(add|mul|sub|div|cat|where|addcmul)")
_ATTENTION = re.compile(r"attention|bmm|matmul")
_OF_LOGITS = re.compile(r"_log_softmax")
_UPCASTS_LOGITS = "transformers/loss/"
_TINY_SHARE = 1 / 4096  # of the peak: statistics of norms


def autocast(recording: Recording) -> Rewrite | None:
    """Compute matrix products in 16 bits, if activations are float32 throughout."""
    floats = [a for a in recording.live_at_peak if a.category is Category.ACTIVATIONS and "float" in a.dtype]
    if not floats or any(a.dtype != "float32" for a in floats) or not trains(recording):
        return None
    # Attention matrices that a fused kernel would not make. Grouped heads have one in 16 bits only; without it keys and
    # values are repeated, in five dimensions. Other obstacles to it, such as a learned bias, remain.
    own = [a for a in recording.allocations if is_of_sdpa(a)]
    made = [a for a in recording.allocations if a.category is Category.ACTIVATIONS and _is_square(a.shape)]
    sizes = {a.requested_bytes for a in own if _is_square(a.shape)}
    if sizes and not any(len(a.shape or ()) == 5 for a in own):
        return None
    unfused = {a.index for a in made if a.requested_bytes in sizes}
    walk = _DtypeWalk(recording)
    lowered = [part for a in recording.allocations if a.index not in unfused for part in walk.parts(a)]
    dtype = half_type(recording)
    change, costs = change_of("autocast", dtype=dtype)
    short, lightning = "bf16", "bf16-mixed"
    if dtype != "bfloat16":
        costs, short, lightning = f"{costs}, scaled losses", "fp16", "16-mixed"
    how = words_for(recording, "autocast", dtype=dtype, short=short, lightning=lightning)
    return Rewrite(change, costs, how, [*lowered, *_weight_copies(recording)])


def half_weights(recording: Recording) -> Rewrite | None:
    """Keep weights and everything computed from them in 16 bits, for an FP32 model that is not trained."""
    weights = [a for a in recording.allocations if a.category is Category.PARAMETERS and "float" in a.dtype]
    if trains(recording) or not weights or any(a.dtype != "float32" for a in weights):
        return None
    meant = (Category.PARAMETERS, Category.ACTIVATIONS, Category.KV_CACHE)
    halved = resized(recording, lambda a: 0.5 if a.category in meant and a.dtype == "float32" else 1.0)
    dtype = half_type(recording)
    how = words_for(recording, "half-weights", dtype=dtype)
    return Rewrite(*change_of("half-weights", dtype=dtype), how, halved)


def _is_square(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) > 2 and shape[-1] == shape[-2]


class _DtypeWalk:
    """The dtypes that a forward's results would have, and how often a product would copy each."""

    def __init__(self, recording: Recording) -> None:
        tiny = _TINY_SHARE * recording.peak_allocated_bytes
        self._is_half: dict[int, bool] = {}
        self._copies: Counter[int] = Counter()
        self._kept_whole: set[int] = set()
        # Possible input widths by the outputs of a weight, which may be stored transposed.
        self._widths: dict[int, set[int]] = defaultdict(set)
        for a in recording.allocations:
            if a.category is Category.PARAMETERS and a.shape and len(a.shape) > 1:
                outputs, inputs = a.shape[:2]
                self._widths[outputs].add(inputs)
                self._widths[inputs].add(outputs)
        self._recent: list[Allocation] = []
        self._half_logits = False
        made = [a for a in recording.allocations if a.category is Category.ACTIVATIONS and a.dtype == "float32"]
        results = (a for a in made if a.phase in ("forward", "backward") and a.block_bytes >= tiny)
        ordered = sorted(results, key=lambda a: a.born)
        self._loss_backwards = [a.born + 1 for a in ordered if "nll_loss" in a.operator and a.phase == "backward"]
        for a in ordered:
            self._step(a)

    def parts(self, a: Allocation) -> Iterator[Allocation]:
        """Yield the blocks that replace a block."""
        is_half, copies = self._is_half.get(a.index), self._copies[a.index]
        if a.category is Category.WORKSPACE and "conv" in a.operator:
            yield scaled(a, 0.5)  # mostly images in another memory format
        elif is_half:
            yield a if a.index in self._kept_whole else scaled(a, 0.5)
        elif is_half is None or not copies or _KEEPS_ITS_RESULT.search(a.operator):
            yield a
        if copies and not is_half:
            yield replace(scaled(a, 0.5 * copies), index=-1 - a.index)
        if is_half and a.phase != "backward" and _OF_LOGITS.search(a.operator):
            # The loss is computed in 32 bits and saves its input so until its own backward is done.
            after = (moment for moment in self._loss_backwards if moment > a.born)
            yield replace(a, index=-1 - a.index, died=next(after, a.died))

    def _step(self, a: Allocation) -> None:
        operator = a.operator.removeprefix("aten::")
        last = self._recent[-1] if self._recent else None
        if _PRODUCT.search(operator):
            self._is_half[a.index] = True
            if a.phase != "backward":
                # Record what a product copies: its input, or everything attention is computed from.
                taken = self._recent[-3:] if _ATTENTION.search(operator) else self._input_of(a)
                self._copies.update(b.index for b in taken if not self._is_half[b.index])
        elif _OF_LOGITS.match(operator):
            # Cross entropy takes logits as they are; the losses of transformers upcast them first.
            if a.phase != "backward":
                upcast = any(frame.startswith(_UPCASTS_LOGITS) for frame in a.stack)
                self._half_logits = last is not None and self._is_half[last.index] and not upcast
            self._is_half[a.index] = self._half_logits
        elif _FULL.search(operator):
            self._is_half[a.index] = False
            if last is not None and self._is_half[last.index] and _KEEPS_ITS_INPUT.search(operator):
                self._kept_whole.add(last.index)
        else:
            # The result of a dtype-neutral operator is in 16 bits if all its inputs are.
            follows = last is not None and self._is_half[last.index]
            if follows and _OF_TWO.match(operator):
                follows = all(self._is_half[b.index] for b in self._recent if b.shape == a.shape)
            self._is_half[a.index] = follows
        self._recent = [b for b in self._recent[-63:] if b.died is None or b.died > a.born] + [a]

    def _input_of(self, product: Allocation) -> list[Allocation]:
        """Return the latest result of the input size of a matching weight, preferably not made by a weight itself."""
        shape = product.shape or ()
        if len(shape) < 2:
            return []
        at = 1 if "conv" in product.operator else -1
        widths = self._widths.get(shape[at], set())
        if at == 1:
            fitting = [b for b in self._recent if len(b.shape or ()) > 2 and b.shape and b.shape[1] in widths]
        else:
            sizes = {prod(shape[:-1]) * width for width in widths}
            fitting = [b for b in self._recent if prod(b.shape or ()) in sizes]
        plain = [b for b in fitting if _ATTENTION.search(b.operator) or not _PRODUCT.search(b.operator)]
        return (plain or fitting)[-1:]


def _weight_copies(recording: Recording) -> Iterator[Allocation]:
    """Yield a weight's 16-bit copy, from its forward to the end of the backward that uses it."""
    # Shapes of embedding tables that no product uses: those whose row width matches nothing.
    shapes = [tuple(map(int, table.split("x"))) for table in recording.header.training.get("embeddings", "").split()]
    counts = Counter(a.shape for a in recording.allocations if a.category is Category.PARAMETERS)
    widths = {a.shape[-1] for a in recording.allocations if a.category is Category.ACTIVATIONS and a.shape}
    spared = {shape for shape in shapes if shape[0] not in widths and counts[shape] < 2}
    weights = [a for a in recording.allocations if a.category is Category.PARAMETERS and a.dtype == "float32"]
    weights = [a for a in weights if len(a.shape or ()) > 1 and a.shape not in spared]
    backwards = list(spans_of(recording, "backward"))
    starts = [start for start, _ in backwards]
    for number, (start, _) in enumerate(spans_of(recording, "forward")):
        place = bisect_right(starts, start)
        died = backwards[place][1] if place < len(backwards) else None
        for a in weights:
            yield replace(scaled(a, 0.5), index=-2 - 2 * a.index - number * 10**7, born=start, died=died)

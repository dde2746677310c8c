"""llama.cpp: which layers go to the GPUs and which to the host, and the sizes of its buffers on each.

    model buffer    the layers' tensors as the GGUF file stores them (`budget.serving.gguf`); the embedding stays on the host
    KV buffer       slots × context cells in every layer; sliding-window layers keep the window and one batch
    compute buffer  the larger of a batch through a layer with its mask, and of the logits of sampled tokens

Layers are placed on the GPUs from the last one backward, the head first, in equal parts (--split-mode layer), each with its
cache. If the number of layers is not given, as many are placed as leave a GiB free, as llama.cpp does itself; experts alone can
stay on the host. Slots share nothing, and nothing grows after the start. This module does not model time, row or tensor splits,
draft models or vision towers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tonnage.budget import largest
from tonnage.budget.serving import gguf
from tonnage.budget.serving.kv_cache import KvLayout, LayerGroup
from tonnage.budget.serving.memory import (
    GGML_CACHES,
    LONGEST_CONTEXT,
    KvPool,
    ServingBudget,
    ServingConfiguration,
    check,
)
from tonnage.budget.serving.own_engine import context_term
from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.budget.terms import Term
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape
from tonnage.units import GIB

# Tokens per pass (--ubatch-size), the cells a cache is padded to, and the bytes left free on a GPU.
UBATCH, PADDING, MARGIN_BYTES = 512, 256, GIB
# Batches in flight with several GPUs, each with its own mask.
_COPIES = 4
# Builds from which the head is placed first instead of last; and from which the compute buffer has logits of the slots
# only, not of every token of a batch, and the mask in FP16 only.
_HEAD_FIRST_BUILD, _LEAN_BUILD = 7467, 9460
LATEST_BUILD = 10586
# Architectures whose sliding windows it stores separately; others (Mistral 7B, Phi-3) keep every token.
_WINDOWED = tuple("gemma2 gemma3 gemma4 gpt_oss llama4 cohere2 exaone4 olmo3 mimo_v2 step3p5 afmoe".split())
# For unified memory, where the GPU's budget counts what the host holds.
_UNBOUND = 1 << 62
CACHES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"} | {name: name for name in GGML_CACHES}


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that one GPU, or the host, holds."""

    layers: int
    weights: int
    cache: int
    compute: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute + self.context


class LlamaCppRun:
    """A model, its file and its flags on some GPUs; computes sizes by layers on the GPUs, slots and context."""

    def __init__(self, shape: ModelShape, asked: ServingConfiguration, gpu: Gpu, gpus: int) -> None:
        self.shape, self.asked, self.gpu, self.gpus = shape, asked, gpu, gpus
        self.recipe = gguf.GgufRecipe(shape, asked.weights)
        self.count, self.ubatch = len(shape.decoder.layers), asked.batched_tokens
        digits = asked.engine_version.strip().removeprefix("b")
        if digits and not digits.isdecimal():
            hint = "Write it like --engine-version b6106."
            raise RequestError(f"{asked.engine_version!r} is no build of llama.cpp.", hint=hint)
        build = int(digits or LATEST_BUILD)
        self._lean, self._head_first = build >= _LEAN_BUILD, build >= _HEAD_FIRST_BUILD

    @cached_property
    def layers(self) -> tuple[gguf.LayerBytes, ...]:
        """Bytes of each layer."""
        return tuple(self.recipe.layer(number) for number in range(self.count))

    def parts(self, on_gpu: int) -> tuple[tuple[int, ...], tuple[range, ...]]:
        """Return the layer indices of the host, then of each GPU; the head has the last index."""
        end = self.count + (self._head_first or on_gpu > self.count)
        start = max(end - on_gpu, 0)
        cuts = [start + -(-(end - start) * card // self.gpus) for card in range(self.gpus + 1)]
        kept = (*range(start), *range(end, self.count + 1))
        return kept, tuple(range(first, last) for first, last in pairwise(cuts))

    def card(self, numbers: range, on_gpu: int, users: int, context: int) -> DeviceBytes:
        """Return the bytes of one GPU with these layers."""
        inner = [number for number in numbers if number < self.count]
        weights = sum(self.layers[n].rest if n < self.asked.cpu_experts else self.layers[n].total for n in inner)
        weights += self.recipe.output_bytes if self.count in numbers else 0
        cache = sum(self.layer_cache(self.shape.decoder.layers[number], users, context) for number in inner)
        compute = self._compute(numbers, on_gpu, users, context) if len(numbers) else 0
        process = int(context_term(self.gpu).size_bytes) if len(numbers) else 0
        return DeviceBytes(len(numbers), weights, cache, compute, process)

    def host(self, numbers: tuple[int, ...], users: int, context: int) -> DeviceBytes:
        """Return the host's bytes: its layers, offloaded experts, the embedding, and a batch's intermediate tensors."""
        inner = [number for number in numbers if number < self.count]
        offloaded = self.layers[len(inner) : self.asked.cpu_experts]
        weights = self.recipe.embedding_bytes + sum(self.layers[number].total for number in inner)
        weights += sum(layer.experts for layer in offloaded)
        weights += self.recipe.output_bytes if self.count in numbers and not self.shape.tied else 0
        cache = sum(self.layer_cache(self.shape.decoder.layers[number], users, context) for number in inner)
        passed = self.ubatch * (4 * self.shape.hidden + (2 if self._lean else 4) * self._cells(context))
        return DeviceBytes(len(numbers), weights, cache, passed + 4 * users * self.shape.vocab, 0)

    def _cells(self, tokens: int) -> int:
        return -(-tokens // PADDING) * PADDING

    def layer_cache(self, layer: LayerShape, users: int, context: int) -> int:
        """Return the cache bytes of one layer for all slots."""
        mixer = layer.attention
        if mixer is None:
            return 0
        if mixer.kind is AttentionKind.RECURRENT:
            return users * 4 * mixer.state_elements
        window = mixer.window if self.shape.architecture.startswith(_WINDOWED) else 0
        kept = min(context, window + self.ubatch) if window else context
        # The small caches of windows are not quantized.
        kind = "f16" if window and self._lean else CACHES[self.asked.kv]
        if mixer.kind is AttentionKind.LATENT:
            return users * self._cells(kept) * gguf.row_bytes(kind, mixer.latent_rank + mixer.rope_dim)
        keys, values = mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_head_dim
        return users * self._cells(kept) * (gguf.row_bytes(kind, keys) + gguf.row_bytes(kind, values))

    def _compute(self, numbers: range, on_gpu: int, users: int, context: int) -> int:
        """Return the larger of a batch in a layer and of the logits, including batches for the host's layers."""
        hidden = self.shape.hidden
        rows = min(users, self.ubatch) if self._lean else self.ubatch
        # Layers of the host run on the first GPU if the batch is large.
        kept, cards = self.parts(on_gpu)
        first = numbers == cards[0]
        head = self.count in numbers or (first and self.count in kept)
        logits = 4 * (rows * self.shape.vocab + self.ubatch * hidden) if head else 0
        logits += self.recipe.output_bytes if first and self.count in kept else 0
        whole = on_gpu > self.count and not self.asked.cpu_experts
        copies = _COPIES if self.gpus > 1 and whole else 1
        # Mask bytes per token of a batch and cell of a slot.
        mask_bytes = 2 * copies if self._lean else 4 * copies + 2
        mask = self.ubatch * self._cells(context) * (mask_bytes if self.asked.flash_attention else 4 * copies)
        # ggml reuses dead tensors: what remains is a layer's widest point, its input and its residual sum.
        widest = 0
        for layer in self.shape.decoder.layers:
            if (mixer := layer.attention) is not None and mixer.kind is not AttentionKind.RECURRENT:
                scores = 0 if self.asked.flash_attention else self._cells(context)
                widest = max(widest, mixer.heads * (mixer.head_dim + mixer.value_head_dim + scores))
            if (mlp := layer.feed_forward) is not None:
                one = (2 if mlp.gated else 1) * mlp.intermediate
                experts = mlp.experts_per_token * (one + hidden) + 2 * mlp.shared_intermediate
                widest = max(widest, experts if mlp.experts else one)
        # The largest tensor copied from the host for a batch: a third of a layer's experts or MLP.
        away = [self.layers[number] for number in (*kept, *range(self.asked.cpu_experts)) if number < self.count]
        moved = max(((layer.experts or layer.rest) // 3 for layer in away), default=0) if first else 0
        return max(logits, mask + 4 * self.ubatch * (2 * hidden + widest) + moved)

    def fitting(self, room_bytes: int) -> int:
        """Return the most layers that leave the margin free on every GPU."""
        asked = self.asked

        def fits(on_gpu: int) -> bool:
            cards = (self.card(part, on_gpu, asked.users, asked.context) for part in self.parts(on_gpu)[1])
            return max(card.total for card in cards) <= room_bytes - MARGIN_BYTES

        return largest(0, self.count + 1, fits)


@dataclass(frozen=True)
class LlamaPool(KvPool):
    """The cells of all slots, which llama.cpp allocates at start."""

    case: LlamaCppRun = None  # type: ignore[assignment]
    on_gpu: int = 0
    room_bytes: int = 0
    host_bytes: int = 0

    def holds(self, users: int, context: int, prefix: int = 0) -> bool:
        """Say whether that many slots fit with the current placement of layers."""
        kept, cards = self.case.parts(self.on_gpu)
        host = self.case.host(kept, users, context).total
        held = (self.case.card(part, self.on_gpu, users, context).total for part in cards)
        return host <= self.host_bytes and all(total <= self.room_bytes for total in held)

    def most_users(self, context: int, prefix: int = 0) -> int:
        """Return how many slots of that length fit."""
        low, high = 0, 1
        while high < LONGEST_CONTEXT and self.holds(high, context):
            low, high = high, 2 * high
        return largest(low, high - 1, lambda users: self.holds(users, context))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBudget(ServingBudget):
    """The budget of the fullest GPU and of the host. `gpu_layers` counts the head, as llama.cpp does."""

    case: LlamaCppRun
    gpu_layers: int
    layers: int
    host: DeviceBytes
    host_capacity_bytes: int
    cards: tuple[DeviceBytes, ...]
    host_expert_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """What the fullest GPU holds: nothing grows later."""
        return self.total_bytes

    @property
    def host_overflows(self) -> bool:
        """Whether the host's part exceeds its memory."""
        return self.host.total > self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether every buffer fits."""
        return not self.overflows and not self.host_overflows


def resolved(shape: ModelShape, asked: ServingConfiguration) -> ServingConfiguration:
    """Return the configuration with llama.cpp's defaults filled in."""
    stored = shape.dtype if shape.dtype in gguf.file_types() else ""
    bits = WEIGHT_FORMATS[shape.dtype].bits if shape.dtype in WEIGHT_FORMATS else 16
    weights = asked.weights or stored or ("q4_k_m" if bits < 8 else "q8_0")
    if weights not in gguf.file_types():
        hint = f"Use --weights with one of: {', '.join(gguf.file_types())}."
        raise RequestError(f"llama.cpp reads no {weights} weights.", hint=hint)
    if asked.kv and asked.kv not in CACHES:
        raise RequestError(f"llama.cpp keeps no {asked.kv} cache.", hint=f"Use --kv with one of: {', '.join(CACHES)}.")
    return replace(
        asked, weights=weights, kv=asked.kv or "fp16", block=1, engine_version=asked.engine_version or f"b{LATEST_BUILD}",
        max_seqs=asked.max_seqs or asked.users, batched_tokens=asked.batched_tokens or UBATCH, utilization=1.0,
        cpu_experts=min(asked.cpu_experts, len(shape.decoder.layers)),
    )  # fmt: skip


def llama_budget(
    shape: ModelShape, config: ServingConfiguration, gpu: Gpu, *, gpus: int, host_bytes: int
) -> LlamaBudget:
    """Return what the fullest GPU and the host hold. `host_bytes` 0: memory is unified and counts as the GPU's."""
    check(shape, config)
    _check(shape, config)
    asked = resolved(shape, config)
    case = LlamaCppRun(shape, asked, gpu, gpus)
    room = max(gpu.memory_bytes - asked.reserved_bytes, 0)
    on_gpu = case.fitting(room) if asked.gpu_layers < 0 else min(asked.gpu_layers, case.count + 1)
    if (unified := not host_bytes) and asked.gpu_layers < 0:
        on_gpu = case.count + 1
    kept, parts = case.parts(on_gpu)
    cards = tuple(case.card(part, on_gpu, asked.users, asked.context) for part in parts)
    fullest, host = max(cards, key=lambda each: each.total), case.host(kept, asked.users, asked.context)
    terms = tuple(_terms(case, fullest, host if unified else None))
    notes = []
    if shape.max_positions and asked.context > shape.max_positions:
        stated, context = f"{shape.max_positions:,}", f"{asked.context:,}"
        notes.append(f"the model states {stated} positions: a context of {context} needs its rope scaled")
    if gpus > 1 and 0 < on_gpu < gpus:
        notes.append(f"only {on_gpu} of {gpus} cards have a layer")
    share = sum(case.layer_cache(layer, 1, PADDING) for layer in shape.decoder.layers) // PADDING
    cells = -(-asked.context // PADDING) * PADDING * asked.users
    layout = KvLayout(1, share, (LayerGroup(AttentionKind.FULL),))
    pool = LlamaPool(
        layout, fullest.cache, cells, cells, case.ubatch, case=case, on_gpu=on_gpu,
        room_bytes=room - (host.total if unified else 0), host_bytes=host_bytes or _UNBOUND,
    )  # fmt: skip
    return LlamaBudget(
        configuration=asked, capacity_bytes=gpu.memory_bytes, limit_bytes=room, outside_bytes=0, terms=terms, kv=pool,
        notes=(*notes, *shape.notes), case=case, gpu_layers=on_gpu, layers=case.count + 1, host=host, cards=cards,
        host_capacity_bytes=host_bytes or _UNBOUND,
        host_expert_bytes=sum(case.layers[n].experts for n in {*range(asked.cpu_experts), *kept} if n < case.count),
    )  # fmt: skip


def _check(shape: ModelShape, asked: ServingConfiguration) -> None:
    if asked.tp > 1 or asked.pp > 1:
        raise BadLayout("llama.cpp gives each card a part of the layers by itself.", hint="Leave --tp and --pp out.")
    if asked.shared_prefix:
        raise RequestError("llama.cpp's slots share no prefix.", hint="Leave --prompt-shared out.")
    mixture = any(layer.feed_forward and layer.feed_forward.experts for layer in shape.decoder.layers)
    if asked.cpu_experts and not mixture:
        hint = "Use --gpu-layers instead of --cpu-moe."
        raise RequestError(f"{shape.name} has no experts to keep on the host.", hint=hint)
    if asked.kv.startswith("q") and not asked.flash_attention:
        hint = "Leave --no-flash-attention out, or use --kv fp16."
        raise RequestError(f"A {asked.kv} cache needs flash attention in llama.cpp.", hint=hint)


def _terms(case: LlamaCppRun, card: DeviceBytes, unified: DeviceBytes | None) -> Iterator[Term]:
    """Yield the buffers of one GPU, by llama.cpp's names."""
    numbers: dict[str, object] = {"layers": card.layers, "file_bytes": case.recipe.file_bytes}
    formula = "tensors of the card's layers, by type of block"
    yield Term(Category.PARAMETERS, "model buffer", card.weights, formula, numbers)
    if unified is not None:
        yield Term(Category.PARAMETERS, "embedding", unified.weights, "the host's part, in the same memory", {})
    asked = case.asked
    cells: dict[str, object] = {"slots": asked.users, "context": asked.context, "type": CACHES[asked.kv]}
    yield Term(Category.KV_CACHE, "KV buffer", card.cache, "layers × slots × cells × (keys + values)", cells)
    batch: dict[str, object] = {"ubatch": case.ubatch, "vocabulary": case.shape.vocab}
    formula = "max(logits of what is sampled, a batch in a layer with its mask)"
    yield Term(Category.ACTIVATIONS, "compute buffer", card.compute, formula, batch, "model")
    if unified is not None:
        formula = "inputs and outputs of a batch"
        yield Term(Category.ACTIVATIONS, "host compute buffer", unified.compute, formula, {}, "model")
    if card.context:
        yield context_term(case.gpu)

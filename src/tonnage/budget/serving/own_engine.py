"""The memory of Tonnage's own engine, to the byte where it can be counted, and the KV cache blocks it leaves.

    blocks = (share of the card − weights − planned reserve) // bytes per block

The engine sizes its KV cache with these functions, so a plan and a start give the same number of blocks. It verifies them at
start: it runs its largest steps and captures its graphs before allocating the cache, and uses the measured size if the reserve
is too small. The reserve is therefore an upper estimate; it follows the tensors of `serve.models.decoder` and
`serve.model_runner`. This module does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.budget.serving.kv_cache import KV_FORMATS, KvFormat
from tonnage.budget.terms import Term
from tonnage.errors import RequestError
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, ModelShape
from tonnage.units import KIB, MIB

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingConfiguration

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "mixtral", "qwen3_moe")
# FP8 keeps a bfloat16 scale per head and token, for keys and for values.
_WHOLE_FORMATS = {name: KV_FORMATS[name] for name in ("fp32", "fp16", "bf16")}
OWN_KV_FORMATS = _WHOLE_FORMATS | {"fp8": KvFormat("fp8", 8, scale_bytes=2)}
OWN_WEIGHTS = ("fp32", "fp16", "bf16", "fp8", "int8")
UTILIZATION, MAX_SEQS, BATCHED_TOKENS = 0.9, 256, 8192
GRAPHS, ROUNDING = "CUDA graphs", "the allocator's rounding"
# Rows that the sampler filters at once (top-k, top-p), and bytes it needs per vocabulary entry.
FILTERED_ROWS, FILTERED_BYTES = 64, 26
# Largest number of rows for which a kernel reads 8-bit weights directly.
_NARROW_ROWS = 256
# Partial results of split-KV attention, used when few rows must fill the GPU.
_SPLITS_BYTES = 16 * MIB
# Driver memory per CUDA graph and per layer in it.
_GRAPH_BYTES, _GRAPH_LAYER_BYTES = 3 * MIB, 185 * KIB
# The allocator rounds large tensors up to multiples of this.
_SEGMENT_BYTES = 2 * MIB
# Fragmentation between blocks of varying sizes, as a share of the step's peak.
_GAPS = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWidths:
    """The model sizes that determine memory beside the weights. `intermediate` is per expert in a mixture."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    ropes: int = 1  # rotary embedding tables: Gemma 3 has two


@dataclass(frozen=True, slots=True)
class OwnPool:
    """The KV cache: `blocks` of `block_bytes`, including the null block used for padding."""

    block: int
    block_bytes: int
    blocks: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """Token capacity of all blocks."""
        return self.blocks * self.block


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCard:
    """The memory plan of one engine start. `measured_bytes` is the process's memory after warm-up, None before."""

    name: str
    capacity_bytes: int
    limit_bytes: int
    limits: "ServingConfiguration"
    weight_bytes: int
    reserve: tuple[Term, ...]
    pool: OwnPool
    measured_bytes: int | None = None

    @property
    def reserve_bytes(self) -> int:
        """Everything except weights and KV cache."""
        return sum(int(term.size_bytes) for term in self.reserve)

    @property
    def total_bytes(self) -> int:
        """Everything the engine plans to hold."""
        return self.weight_bytes + self.pool.size_bytes + self.reserve_bytes

    @property
    def left_bytes(self) -> int:
        """Card memory it leaves free."""
        return self.capacity_bytes - self.total_bytes

    def reserved_for(self, category: Category, name: str = "") -> int:
        """Return the reserve of one category, optionally only the terms of one name."""
        return sum(int(t.size_bytes) for t in self.reserve if t.category is category and name in ("", t.name))


def own_card(
    widths: ModelWidths, limits: "ServingConfiguration", gpu: Gpu | None, *, name: str, capacity_bytes: int, limit_bytes: int,
    weight_bytes: int,
) -> OwnCard:  # fmt: skip
    """Plan one start: the reserve, then the KV cache, whose blocks fill the rest of the engine's share."""
    reserve = own_reserve(widths, limits, gpu)
    held, size = sum(int(term.size_bytes) for term in reserve), own_block_bytes(widths, limits.kv, limits.block)
    pool = OwnPool(limits.block, size, max(limit_bytes - weight_bytes - held, 0) // size)
    return OwnCard(
        name=name, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes, limits=limits, weight_bytes=weight_bytes,
        reserve=reserve, pool=pool,
    )  # fmt: skip


def own_block_bytes(widths: ModelWidths, kv: str, block: int = 16) -> int:
    """Return the bytes of one block: keys, values and scales of `block` tokens in every layer. Windows use full blocks."""
    vectors = 2 * widths.layers * block * widths.kv_heads
    return vectors * OWN_KV_FORMATS[kv].vector_bytes(widths.head_dim)


def own_reserve(widths: ModelWidths, limits: "ServingConfiguration", gpu: Gpu | None) -> tuple[Term, ...]:
    """Return everything except weights and KV cache. `gpu` None: on the CPU, without graphs or CUDA context."""
    # The largest of layers, head and sampler, plus fragmentation. The sampler has logits, a copy of the rows that need
    # filtering, and temporaries for the rows filtered at once.
    tables = 4 * (limits.max_seqs + 1) * limits.columns
    staged = 3 * limits.batched_tokens + limits.max_seqs * (2 * limits.columns + 20) + 16  # elements of the inputs
    drawn = 8 * limits.rows + min(limits.rows, FILTERED_ROWS) * FILTERED_BYTES
    parts = {
        "forward_bytes": 8 * staged + tables + _forward_bytes(widths, limits, limits.batched_tokens),
        "head_bytes": 8 * staged + tables + _head_bytes(widths, limits, limits.batched_tokens),
        "sampler_bytes": drawn * widths.vocab,
    }
    numbers: dict[str, object] = {**parts, "tokens": limits.batched_tokens, "rows": limits.rows}
    numbers |= {"vocabulary": widths.vocab, "gaps": _GAPS}
    size, formula = int(max(parts.values()) * (1 + _GAPS)), "max(forward, head, sampler) × (1 + gaps)"
    step = Term(Category.ACTIVATIONS, "peak of a step", size, formula, numbers, "model")
    # Persistent buffers: rotary tables (cosines and sines of half the dimensions, in FP32), per-slot state, inputs.
    rotary = widths.ropes * limits.context * widths.head_dim * 4
    numbers = {"rotary_bytes": rotary, "tables_bytes": tables, "inputs_bytes": 4 * staged}
    size = rotary + tables + 4 * staged + 32 * (limits.max_seqs + 1)
    buffers = Term(Category.WORKSPACE, "buffers", size, "rotary + block tables + inputs + slots", numbers, "model")
    if gpu is None:
        return step, buffers
    # Segments of four matrices per layer with their scales; of embedding, head and the cache itself.
    tensors = 4 * widths.layers + 8
    numbers = {"tensors": tensors, "segment_bytes": _SEGMENT_BYTES}
    segments = tensors * _SEGMENT_BYTES
    rounding = Term(Category.WORKSPACE, ROUNDING, segments, "tensors × segment", numbers, "model")
    # cuBLAS workspaces as torch allocates them, for the step's stream and the capture stream.
    streams = 1 if limits.eager else 2
    size = streams * gpu.cublas_workspace_bytes
    cublas = Term(Category.WORKSPACE, "cuBLAS", size, "streams × workspace", {"streams": streams})
    # One graph pool, sized by the largest graph's step and logits, plus driver memory per graph.
    graphs = 0 if limits.eager else len(capture_sizes(limits.rows))
    largest = max(of(widths, limits, limits.rows) for of in (_forward_bytes, _head_bytes)) + tables
    numbers = {"graphs": graphs, "layers": widths.layers, "largest_step_bytes": largest}
    size = largest + graphs * (_GRAPH_BYTES + widths.layers * _GRAPH_LAYER_BYTES) if graphs else 0
    formula = "the largest step + graphs × (bytes per graph + layers × bytes per layer)"
    pool = Term(Category.WORKSPACE, GRAPHS, size, formula, numbers, "rough model")
    return step, buffers, rounding, cublas, pool, context_term(gpu)


def check_formats(weights: str, kv: str) -> None:
    """Raise RequestError for formats the engine cannot store."""
    for what, name, known in (("weights", weights, OWN_WEIGHTS), ("cache", kv, tuple(OWN_KV_FORMATS))):
        if name not in known:
            flag = "--weights" if what == "weights" else "--kv"
            hint = f"Use {flag} with one of: {', '.join(known)}; or --engine vllm."
            raise RequestError(f"Tonnage's own engine keeps no {name} {what}.", hint=hint)


def widths_of(shape: ModelShape) -> ModelWidths:
    """Return the sizes of a model shape; raises RequestError if the engine does not serve it."""
    layers = {id(layer): layer for layer in shape.decoder.layers}.values()
    mixers, mlps = [layer.attention for layer in layers], [layer.feed_forward for layer in layers]
    heads = {(mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.value_head_dim) for mixer in mixers if mixer}
    # Attention with equal key and value widths, and gated MLPs.
    kinds = (AttentionKind.FULL, AttentionKind.SLIDING)
    plain = all(mixer and mixer.kind in kinds and mixer.head_dim == mixer.value_head_dim for mixer in mixers)
    plain = plain and all(mlp and mlp.gated and not mlp.shared_intermediate for mlp in mlps)
    alone = len(shape.stacks) == 1 or shape.architecture == "gemma3"
    if shape.architecture not in FAMILIES or not shape.logits or not alone or not plain or len(heads) != 1:
        hint = f"Use --engine vllm, or a model of one of: {', '.join(FAMILIES)}."
        raise RequestError(f"Tonnage's own engine does not serve {shape.name} ({shape.architecture}).", hint=hint)
    # All layers match except for windows, or for experts that only some have.
    layer = max(layers, key=lambda layer: layer.feed_forward.experts if layer.feed_forward else 0)
    mixer, mlp = layer.attention, layer.feed_forward
    assert mixer is not None and mlp is not None
    return ModelWidths(
        layers=len(shape.decoder.layers), hidden=shape.hidden, heads=mixer.heads, kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim, intermediate=mlp.intermediate, vocab=shape.vocab, experts=mlp.experts,
        experts_per_token=mlp.experts_per_token, ropes=2 if shape.architecture.startswith("gemma3") else 1,
    )  # fmt: skip


def own_weight_terms(shape: ModelShape, weights: str) -> Iterator[Term]:
    """Yield the decoder's parameters, a tied head once. 8-bit layer matrices have one FP32 scale per output."""
    whole = 4 if weights == "fp32" else 2
    matrices = outputs = 0
    # Fused QKV, output, fused gate and up, down.
    for layer in shape.decoder.layers if weights in ("fp8", "int8") else ():
        mixer, mlp = layer.attention, layer.feed_forward
        assert mixer is not None and mlp is not None
        query, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        times = mlp.experts or 1
        matrices += shape.hidden * (2 * query + 2 * keys + times * 3 * mlp.intermediate)
        outputs += query + 2 * keys + shape.hidden + times * (2 * mlp.intermediate + shape.hidden)
    # Embedding, layers, final norm and an untied head; towers beside the decoder are not served.
    parameters = shape.decoder.parameters + shape.hidden * (1 + shape.vocab * (1 if shape.tied else 2))
    rest = parameters - matrices
    if matrices:
        yield Term(Category.PARAMETERS, "matrices", matrices, "parameters × 1 byte", {"parameters": matrices})
        yield Term(Category.PARAMETERS, "scales", 4 * outputs, "outputs × 4 bytes", {"outputs": outputs})
    name = "embedding, norms and head" if matrices else "parameters"
    yield Term(Category.PARAMETERS, name, rest * whole, "parameters × bytes", {"parameters": rest, "bytes": whole})


def share_bytes(capacity_bytes: int, share: float) -> int:
    """Return the engine's share of a card, rounded up."""
    return -int(-capacity_bytes * share // 1)


def capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes with a CUDA graph: 1, 2, 4, multiples of 8 up to 64, of 16 beyond, and the largest."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


def _forward_bytes(widths: ModelWidths, limits: "ServingConfiguration", tokens: int) -> int:
    """Return hidden states, residual and norms, beside attention or the MLP, whichever holds more."""
    query, keys, hidden = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim, widths.hidden
    # Projected and rotated queries, outputs of decodes and prefill chunks apart and together; then the output
    # projection.
    attention = tokens * max(4 * query + 2 * keys, 3 * query + 2 * keys + hidden)
    if widths.experts:
        # Rows sorted by expert, through gate and up, their product, down, and back in order. 8-bit weights of all
        # experts are dequantized for their product, whose result is scaled in FP32.
        width, rows = widths.intermediate, tokens * widths.experts_per_token
        scaled, widened = (5, 2 * width * hidden * widths.experts) if limits.eight_bit else (1, 0)
        row = max(hidden + max(3, 2 * scaled) * width, (1 + scaled) * hidden + width, 3 * hidden)
        routing = tokens * (3 * widths.experts + hidden) + 24 * rows
        mlp = routing + max(rows * row, widened + rows * (hidden + 2 * width))
    else:
        # Fused gate and up and their product; or the fused tensor while an 8-bit weight is dequantized beside it.
        both = 2 * widths.intermediate
        widened = both * hidden if limits.eight_bit and tokens > _NARROW_ROWS else 0
        mlp = max(tokens * 3 * widths.intermediate, tokens * both + widened)
    return (tokens * 4 * hidden + max(attention, mlp)) * limits.compute_bytes + _SPLITS_BYTES


def _head_bytes(widths: ModelWidths, limits: "ServingConfiguration", tokens: int) -> int:
    """Return the last hidden states, those of sampled rows, and their logits in compute dtype and in FP32."""
    states = (2 * tokens + 3 * limits.rows) * widths.hidden * limits.compute_bytes
    return states + limits.rows * widths.vocab * (limits.compute_bytes + 4)


def context_term(gpu: Gpu) -> Term:
    """Return what a process holds outside torch's allocator, from the GPU catalogue."""
    parts = {name: gpu.overheads[name].size_bytes for name in ("context", "kernels", "cublas") if name in gpu.overheads}
    source = gpu.overheads["context"].source if "context" in gpu.overheads else "model"
    return Term(Category.CONTEXT, "CUDA context", sum(parts.values()), " + ".join(parts), dict(parts), source)

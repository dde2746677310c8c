"""Tonnage's own engine: what it holds on its card, to the byte where it can be counted, and how many blocks that leaves.

    blocks = (share of the card − weights − planned reserve) // bytes per block

The engine sizes its KV cache by these very functions, so a plan and a start give the same number of blocks. It verifies by
measurement: its largest steps are run and its graphs captured before the cache is made, and where the reserve turns out too
small it goes by what it measured. The reserve is therefore a model that errs on the large side, with its constants below; it
follows the tensors of `serve.models.decoder` and `serve.model_runner`. This module knows no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.budget.forward import cublas_workspace_bytes
from tonnage.budget.kv_cache import KV_FORMATS, KvFormat
from tonnage.budget.terms import Term
from tonnage.errors import RequestError
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, Layer, ModelShape
from tonnage.units import KIB, MIB

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "mixtral", "qwen3_moe")
# FP8 keeps a bfloat16 scale for each head and token, for keys and for values.
OWN_KV_FORMATS = {name: KV_FORMATS[name] for name in ("fp32", "fp16", "bf16")} | {
    "fp8": KvFormat("fp8", 8, scale_bytes=2)
}
OWN_WEIGHTS = ("fp32", "fp16", "bf16", "fp8", "int8")
UTILIZATION, MAX_SEQS, BATCHED_TOKENS = 0.9, 256, 8192
GRAPHS, ROUNDING = "CUDA graphs", "the allocator's rounding"
# Rows that the sampler draws again at once where tokens are ruled out (top-k, top-p), and what it holds of each word.
FILTERED_ROWS, FILTERED_BYTES = 64, 26
# Rows up to which a kernel reads 8-bit weights as they are.
_NARROW_ROWS = 256
# Partial results of attention that is split over keys, where few rows must fill the card.
_SPLITS_BYTES = 16 * MIB
# The driver's own, for each graph and for each layer in it.
_GRAPH_BYTES, _GRAPH_LAYER_BYTES = 3 * MIB, 185 * KIB
# The allocator gives large tensors whole multiples of this.
_SEGMENT_BYTES = 2 * MIB
# What blocks of changing sizes leave between them, of the step's peak.
_GAPS = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """What of a model decides memory beside its weights. `intermediate` is that of an expert in a mixture."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    ropes: int = 1  # tables of rotary positions: Gemma 3 has two


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine is started with. `weights` and `kv` are names of formats."""

    context: int
    weights: str = "bf16"
    kv: str = "bf16"
    block: int = 16
    max_seqs: int = MAX_SEQS
    batched_tokens: int = BATCHED_TOKENS
    eager: bool = False

    @property
    def compute_bytes(self) -> int:
        """Of one number in a forward pass."""
        return 4 if self.weights == "fp32" else 2

    @property
    def eight_bit(self) -> bool:
        """Whether the layers' matrices are kept in 8 bits."""
        return self.weights in ("fp8", "int8")

    @property
    def rows(self) -> int:
        """Sequences that draw a token in one step, at most."""
        return min(self.max_seqs, self.batched_tokens)

    @property
    def columns(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.context // self.block)


@dataclass(frozen=True, slots=True)
class OwnPool:
    """The KV cache: `blocks` of `block_bytes`, of which one is the null block that padding points to."""

    block: int
    block_bytes: int
    blocks: int

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """That all blocks have room for."""
        return self.blocks * self.block


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCard:
    """A start of the engine in bytes. `measured_bytes`: what the process held once it was warm; None before that."""

    name: str
    capacity_bytes: int
    limit_bytes: int
    limits: Limits
    weight_bytes: int
    reserve: tuple[Term, ...]
    pool: OwnPool
    measured_bytes: int | None = None

    @property
    def reserve_bytes(self) -> int:
        """Everything beside weights and KV cache."""
        return sum(int(term.size_bytes) for term in self.reserve)

    @property
    def total_bytes(self) -> int:
        """All that the engine plans to hold."""
        return self.weight_bytes + self.pool.size_bytes + self.reserve_bytes

    @property
    def left_bytes(self) -> int:
        """What it leaves of the card."""
        return self.capacity_bytes - self.total_bytes

    def reserved_for(self, category: Category, name: str = "") -> int:
        """Of the reserve, by category and, where it is given, by name."""
        return sum(int(t.size_bytes) for t in self.reserve if t.category is category and name in ("", t.name))


def own_card(
    widths: Widths,
    limits: Limits,
    gpu: Gpu | None,
    *,
    name: str,
    capacity_bytes: int,
    limit_bytes: int,
    weight_bytes: int,
) -> OwnCard:
    """The whole plan of one start: reserve, then the pool."""
    reserve = own_reserve(widths, limits, gpu)
    held = sum(int(term.size_bytes) for term in reserve)
    pool = own_pool(widths, limits, limit_bytes=limit_bytes, weight_bytes=weight_bytes, reserve_bytes=held)
    return OwnCard(
        name=name, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes, limits=limits, weight_bytes=weight_bytes,
        reserve=reserve, pool=pool,
    )  # fmt: skip


def own_block_bytes(widths: Widths, kv: str, block: int = 16) -> int:
    """One page of every layer: keys and values of `block` tokens, with their scales. Windows keep full pages."""
    vectors = 2 * widths.layers * block * widths.kv_heads
    return vectors * OWN_KV_FORMATS[kv].vector_bytes(widths.head_dim)


def own_pool(widths: Widths, limits: Limits, *, limit_bytes: int, weight_bytes: int, reserve_bytes: int) -> OwnPool:
    """The blocks that weights and reserve leave of the engine's share; 0 where they leave none."""
    size = own_block_bytes(widths, limits.kv, limits.block)
    return OwnPool(limits.block, size, max(limit_bytes - weight_bytes - reserve_bytes, 0) // size)


def own_reserve(widths: Widths, limits: Limits, gpu: Gpu | None) -> tuple[Term, ...]:
    """Everything beside weights and KV cache. `gpu` None: on the CPU, where there are no graphs, libraries or context."""
    terms = [_step(widths, limits), _buffers(widths, limits)]
    if gpu is not None:
        # Four matrices a layer and their scales; embedding, head and the cache itself.
        tensors = 4 * widths.layers + 8
        numbers: dict[str, object] = {"tensors": tensors, "segment_bytes": _SEGMENT_BYTES}
        size = tensors * _SEGMENT_BYTES
        terms.append(Term(Category.WORKSPACE, ROUNDING, size, "tensors × segment", numbers, "model"))
        # cuBLAS as torch allots it, on the stream of steps and on that of capture.
        streams = 1 if limits.eager else 2
        size = streams * cublas_workspace_bytes(gpu)
        terms.append(Term(Category.WORKSPACE, "cuBLAS", size, "streams × workspace", {"streams": streams}))
        terms += [_graphs(widths, limits), context_term(gpu)]
    return tuple(terms)


def check_formats(weights: str, kv: str) -> None:
    """Refuse what the engine cannot keep."""
    for flag, name, known in (("--weights", weights, OWN_WEIGHTS), ("--kv", kv, tuple(OWN_KV_FORMATS))):
        if name not in known:
            raise RequestError(
                f"Tonnage's own engine keeps no {name} {'weights' if flag == '--weights' else 'cache'}.",
                hint=f"Use {flag} with one of: {', '.join(known)}; or --engine vllm.",
            )


def widths_of(shape: ModelShape) -> Widths:
    """The same of a shape that a configuration gave; what the engine does not serve is refused."""
    layer = _refuse_unserved(shape)
    mixer, mlp = layer.attention, layer.feed_forward
    assert mixer is not None and mlp is not None
    return Widths(
        layers=len(shape.decoder.layers),
        hidden=shape.hidden,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        intermediate=mlp.intermediate,
        vocab=shape.vocab,
        experts=mlp.experts,
        experts_per_token=mlp.experts_per_token,
        ropes=2 if shape.architecture.startswith("gemma3") else 1,
    )


def _refuse_unserved(shape: ModelShape) -> Layer:
    """The layer that all are like but for windows, the one with experts where some have none."""
    layers = {id(layer): layer for layer in shape.decoder.layers}.values()
    heads = {(a.heads, a.kv_heads, a.head_dim, a.value_head_dim) for layer in layers if (a := layer.attention)}
    plain = all(_is_plain(layer) for layer in layers)
    alone = len(shape.stacks) == 1 or shape.architecture == "gemma3"
    if shape.architecture not in FAMILIES or not shape.logits or not alone or not plain or len(heads) != 1:
        raise RequestError(
            f"Tonnage's own engine does not serve {shape.name} ({shape.architecture}).",
            hint=f"Use --engine vllm, or a model of one of: {', '.join(FAMILIES)}.",
        )
    return max(layers, key=lambda layer: layer.feed_forward.experts if layer.feed_forward else 0)


def _is_plain(layer: Layer) -> bool:
    """Attention with keys and values of one width, and a gated MLP."""
    mixer, mlp = layer.attention, layer.feed_forward
    if mixer is None or mlp is None or mixer.kind not in (AttentionKind.FULL, AttentionKind.SLIDING):
        return False
    return mixer.head_dim == mixer.value_head_dim and mlp.gated and not mlp.shared_intermediate


def own_weight_terms(shape: ModelShape, weights: str) -> Iterator[Term]:
    """The decoder's parameters, a tied head once. 8 bits: the layers' matrices, with an FP32 scale an output."""
    whole = 4 if weights == "fp32" else 2
    matrices, outputs = _matrices(shape) if weights in ("fp8", "int8") else (0, 0)
    # Embedding, layers, the last norm and a head that is not tied; towers beside the decoder are not served.
    parameters = shape.decoder.parameters + shape.hidden * (1 + shape.vocab * (1 if shape.tied else 2))
    rest = parameters - matrices
    if matrices:
        yield _weights("matrices", matrices, "parameters × 1 byte", {"parameters": matrices})
        yield _weights("scales", 4 * outputs, "outputs × 4 bytes", {"outputs": outputs})
    name = "embedding, norms and head" if matrices else "parameters"
    yield _weights(name, rest * whole, "parameters × bytes", {"parameters": rest, "bytes": whole})


def _weights(name: str, size_bytes: int, formula: str, numbers: dict[str, object]) -> Term:
    return Term(Category.PARAMETERS, name, size_bytes, formula, numbers)


def _matrices(shape: ModelShape) -> tuple[int, int]:
    """Numbers and outputs of the matrices of all layers: queries, keys and values in one, output, gate and up in one, down."""
    parameters = outputs = 0
    for layer in shape.decoder.layers:
        mixer, mlp = layer.attention, layer.feed_forward
        assert mixer is not None and mlp is not None
        query, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        times = mlp.experts or 1
        parameters += shape.hidden * (2 * query + 2 * keys + times * 3 * mlp.intermediate)
        outputs += query + 2 * keys + shape.hidden + times * (2 * mlp.intermediate + shape.hidden)
    return parameters, outputs


def share_bytes(capacity_bytes: int, share: float) -> int:
    """The engine's share of a card, rounded up."""
    return -int(-capacity_bytes * share // 1)


def capture_sizes(largest: int) -> list[int]:
    """Numbers of decoding rows that graphs are captured for: 1, 2, 4, steps of 8 up to 64, of 16 beyond; the largest."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


def _step(widths: Widths, limits: Limits) -> Term:
    """The larger of the layers, the head and the sampler; and what lies unused between their tensors."""
    inputs = 8 * _staged(limits) + _tables_bytes(limits)
    # Logits, those of rows that need more than the plain draw, and what drawing some of them again at a time takes.
    drawn = 8 * limits.rows + min(limits.rows, FILTERED_ROWS) * FILTERED_BYTES
    parts = {
        "forward": inputs + _forward_bytes(widths, limits, limits.batched_tokens),
        "head": inputs + _head_bytes(widths, limits, limits.batched_tokens),
        "sampler": drawn * widths.vocab,
    }
    numbers: dict[str, object] = {f"{name}_bytes": size for name, size in parts.items()}
    numbers |= {"tokens": limits.batched_tokens, "rows": limits.rows, "vocabulary": widths.vocab, "gaps": _GAPS}
    size = int(max(parts.values()) * (1 + _GAPS))
    formula = "max(forward, head, sampler) × (1 + gaps)"
    return Term(Category.ACTIVATIONS, "peak of a step", size, formula, numbers, "model")


def _forward_bytes(widths: Widths, limits: Limits, tokens: int) -> int:
    """States, their sum and their norms; beside them attention or the MLP, whichever holds more."""
    query, keys, hidden = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim, widths.hidden
    # Projected and rotated queries, decodes' and chunks' answers apart and together; then what becomes of the answer.
    attention = tokens * max(4 * query + 2 * keys, 3 * query + 2 * keys + hidden)
    if widths.experts:
        mlp = _experts_elements(widths, limits, tokens)
    else:
        # Gate and up in one, and their product; or the first of these while an 8-bit weight stands beside it made wide.
        both = 2 * widths.intermediate
        widened = both * hidden if limits.eight_bit and tokens > _NARROW_ROWS else 0
        mlp = max(tokens * 3 * widths.intermediate, tokens * both + widened)
    return (tokens * 4 * hidden + max(attention, mlp)) * limits.compute_bytes + _SPLITS_BYTES


def _experts_elements(widths: Widths, limits: Limits, tokens: int) -> int:
    """Rows sorted by expert, through gate and up, their product, down, and back in order.

    8-bit weights of all experts are made wide for their product, and what comes of it is scaled in FP32.
    """
    hidden, width = widths.hidden, widths.intermediate
    scaled, widened = (5, 2 * width * hidden * widths.experts) if limits.eight_bit else (1, 0)
    row = max(hidden + max(3, 2 * scaled) * width, (1 + scaled) * hidden + width, 3 * hidden)
    rows = tokens * widths.experts_per_token
    routing = tokens * (3 * widths.experts + hidden) + 24 * rows
    return routing + max(rows * row, widened + rows * (hidden + 2 * width))


def _head_bytes(widths: Widths, limits: Limits, tokens: int) -> int:
    """The last states, those of rows that draw, and their logits: as computed, and in FP32."""
    states = (2 * tokens + 3 * limits.rows) * widths.hidden * limits.compute_bytes
    return states + limits.rows * widths.vocab * (limits.compute_bytes + 4)


def _staged(limits: Limits) -> int:
    """Numbers of a step's inputs, at most."""
    return 3 * limits.batched_tokens + limits.max_seqs * (2 * limits.columns + 20) + 16


def _tables_bytes(limits: Limits) -> int:
    return 4 * (limits.max_seqs + 1) * limits.columns


def _buffers(widths: Widths, limits: Limits) -> Term:
    """What lives as long as the engine: rotary tables, what is kept by slot, a step's inputs."""
    rotary = widths.ropes * limits.context * widths.head_dim * 4  # cosines and sines of half the dimensions, in FP32
    numbers: dict[str, object] = {
        "rotary_bytes": rotary, "tables_bytes": _tables_bytes(limits), "inputs_bytes": 4 * _staged(limits),
    }  # fmt: skip
    size = rotary + _tables_bytes(limits) + 4 * _staged(limits) + 32 * (limits.max_seqs + 1)
    return Term(Category.WORKSPACE, "buffers", size, "rotary + block tables + inputs + slots", numbers, "model")


def _graphs(widths: Widths, limits: Limits) -> Term:
    """One pool, as large as the largest graph's step with its logits, and the driver's own bytes for each graph."""
    graphs = 0 if limits.eager else len(capture_sizes(limits.rows))
    step = max(_forward_bytes(widths, limits, limits.rows), _head_bytes(widths, limits, limits.rows))
    step += _tables_bytes(limits)
    size = step + graphs * (_GRAPH_BYTES + widths.layers * _GRAPH_LAYER_BYTES) if graphs else 0
    numbers: dict[str, object] = {"graphs": graphs, "layers": widths.layers, "largest_step_bytes": step}
    formula = "the largest step + graphs × (bytes per graph + layers × bytes per layer)"
    return Term(Category.WORKSPACE, GRAPHS, size, formula, numbers, "rough model")


def context_term(gpu: Gpu) -> Term:
    """What a process holds outside of torch's allocator, from the catalogue."""
    parts = {name: gpu.overheads[name].size_bytes for name in ("context", "kernels", "cublas") if name in gpu.overheads}
    source = gpu.overheads["context"].source if "context" in gpu.overheads else "model"
    return Term(Category.CONTEXT, "CUDA context", sum(parts.values()), " + ".join(parts), dict(parts), source)

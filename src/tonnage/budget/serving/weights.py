"""The weights of a served model on one GPU: what is quantized, what is split, what every rank keeps whole.

Quantized are the decoder's attention and MLP matrices. Embeddings, head, norms, biases, routers and vision towers keep
16 bits, as in every common checkpoint (AWQ, GPTQ, FP8, W8A8); GGUF and MLX quantize embeddings and head too. Tensor
parallelism splits matrices, embeddings and the head, keeps norms, routers and the compressing matrices of latent
attention whole, and replicates KV heads if there are more ranks than heads.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from tonnage.budget import table
from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape

# Engines pad the vocabulary so that it can be split.
VOCAB_PADDING = 64
# Weights of MXFP4 that share a scale.
MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored. `group` is how many weights of a row share a scale; 0: the whole row.

    `experts_only`: the other matrices keep 16 bits. `container`: the file format that quantizes embeddings and head too
    ("gguf", "mlx"); empty for safetensors.
    """

    name: str
    bits: float
    group: int = 0
    scale_bytes: int = 0
    zero_bits: int = 0
    experts_only: bool = False
    container: str = ""

    @property
    def quantized(self) -> bool:
        """Whether it has fewer bits than the compute dtype."""
        return self.bits < 16

    @property
    def unquantized_bytes(self) -> int:
        """Bytes per weight that is not quantized."""
        return 4 if self.bits == 32 else 2

    def matrix_bytes(self, parameters: int) -> int:
        """Return the bytes of the weights without scales."""
        return ceil(parameters * self.bits / 8)

    def scales_bytes(self, parameters: int, row: int) -> int:
        """Return the bytes of scales and zero points: one per group, or per row."""
        if not self.scale_bytes:
            return 0
        groups = -(-parameters // (self.group or row))
        return groups * self.scale_bytes + -(-groups * self.zero_bits // 8)


WEIGHT_FORMATS = {name: WeightFormat(name, **row) for name, row in table("weight_formats").items()}


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The decoder layers of one pipeline stage, and whether it has the model's first or last part.

    The first stage also has encoders and towers, of which only the parameter count is known here.
    """

    layers: tuple[LayerShape, ...]
    kinds: tuple[tuple[LayerShape, int], ...]  # each distinct layer, and its count
    first: bool
    last: bool


def even_counts(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage as vLLM splits them: the remainder goes to the last stages before the final one."""
    counts = [layers // pp] * pp
    for behind in range(2, layers % pp + 2):
        counts[-behind] += 1
    return tuple(counts)


def stages(shape: ModelShape, pp: int, counts: tuple[int, ...] = ()) -> tuple[StageLayers, ...]:
    """Return the stages, with `counts` layers each or split evenly."""
    cut = counts or even_counts(len(shape.decoder.layers), pp)
    return tuple(stage_at(shape, sum(cut[:number]), count) for number, count in enumerate(cut))


def stage_at(shape: ModelShape, start: int, count: int) -> StageLayers:
    """Return the stage of `count` layers beginning at `start`."""
    layers = shape.decoder.layers
    part = layers[start : start + count]
    # Equal layers are mostly one object, and comparing ids is faster than comparing fields.
    counts = Counter(map(id, part))
    kinds = tuple((layer, counts[key]) for key, layer in {id(layer): layer for layer in part}.items())
    return StageLayers(part, kinds, start == 0, start + count == len(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """The kernel for 4-bit experts and the layout it requires: widths are rounded up to multiples.

    `keeps_scales`: the checkpoint's scales stay in memory beside the rearranged ones.
    """

    name: str
    hidden: int
    intermediate: int
    scale_outputs: int
    keeps_scales: bool
    bias_bytes: int


def weight_terms(
    shape: ModelShape, stage: StageLayers, tp: int, form: WeightFormat, kernel: ExpertKernel | None = None
) -> Iterator[Term]:
    """Yield what one rank of a stage holds, with experts in their kernel's layout."""
    whole = form.unquantized_bytes
    # A rank's part of attention and MLP, of the experts, and what it keeps whole: norms and routers.
    matrices = experts = rest = 0
    for layer, count in stage.kinds:
        mlp = layer.feed_forward
        router = mlp.experts * shape.hidden if mlp and mlp.experts else 0
        split = -(-(layer.feed_forward_parameters - router) // tp)
        matrices += count * (_attention(layer, shape.hidden, tp) + split)
        experts += count * -(-mlp.experts * layer.expert_parameters // tp) if mlp else 0
        rest += count * (layer.norm_parameters + router)
    if form.experts_only:
        plain = matrices - experts
        yield _term("other matrices", plain * whole, "parameters × bytes", {"parameters": plain, "bytes": whole})
        matrices = experts
        if kernel is not None:
            yield from _laid_out(shape, stage, tp, kernel)
            matrices = 0
    numbers: dict[str, object] = {"matrices": matrices, "bits": form.bits, "tp": tp, "layers": len(stage.layers)}
    if matrices:
        yield _term("matrices", form.matrix_bytes(matrices), "matrices × bits / 8", numbers)
    if form.scale_bytes and matrices:
        per = form.group or shape.hidden
        scales = form.scales_bytes(matrices, shape.hidden)
        counted: dict[str, object] = {"group": per, "scale_bytes": form.scale_bytes, "zero_bits": form.zero_bits}
        yield _term("scales", scales, "matrices / group × (scale + zero)", counted)
    yield _term("norms and routers", rest * whole, "parameters × bytes", {"parameters": rest, "bytes": whole})
    yield from _ends(shape, stage, tp, form)


def _laid_out(shape: ModelShape, stage: StageLayers, tp: int, kernel: ExpertKernel) -> Iterator[Term]:
    """Yield MXFP4 experts with their scales and biases, padded for their kernel."""
    values = scales = biases = 0
    hidden = _rounded(shape.hidden, kernel.hidden)
    for layer, count in stage.kinds:
        mlp = layer.feed_forward
        if mlp is None or not mlp.experts:
            continue
        wide = 2 if mlp.gated else 1
        between, each = _rounded(-(-mlp.intermediate // tp), kernel.intermediate), count * mlp.experts
        values += each * (wide + 1) * hidden * between
        rows = _rounded(wide * between, kernel.scale_outputs), _rounded(hidden, kernel.scale_outputs)
        scales += each * (rows[0] * hidden + rows[1] * between) // MXFP4_BLOCK
        if kernel.keeps_scales:
            scales += each * (wide + 1) * hidden * between // MXFP4_BLOCK
        if layer.expert_parameters > (wide + 1) * shape.hidden * mlp.intermediate:
            biases += each * (wide * between + hidden)
    numbers: dict[str, object] = {"values": values, "hidden": hidden, "kernel": kernel.name}
    yield _term("experts", values // 2, "values padded for their kernel / 2", numbers)
    words = "a byte for 32 values" + ", as in the checkpoint and as laid out" * kernel.keeps_scales
    yield _term("scales", scales, words, {"scales": scales})
    if biases:
        numbers = {"biases": biases, "bytes": kernel.bias_bytes}
        yield _term("biases of experts", biases * kernel.bias_bytes, "biases × bytes", numbers)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _ends(shape: ModelShape, stage: StageLayers, tp: int, form: WeightFormat) -> Iterator[Term]:
    whole = form.unquantized_bytes
    # GGUF and MLX tables include their scales: bytes per weight with its share of a scale.
    per = form.bits / 8 + (form.scale_bytes / form.group if form.group else 0) if form.container else whole
    encoders = -(-sum(stack.parameters for stack in shape.stacks[:-1]) // tp)
    if stage.first and encoders:
        yield _term("encoders", encoders * whole, "parameters / tp × bytes", {"parameters": encoders, "tp": tp})
    embedding = _vocabulary(shape, shape.embedding_parameters, tp)
    if stage.first or (stage.last and shape.tied):
        yield _term("embedding", ceil(embedding * per), "parameters / tp × bytes", {"parameters": embedding, "tp": tp})
    if stage.last and shape.head_parameters:
        head = _vocabulary(shape, shape.head_parameters, tp)
        yield _term("head", ceil(head * per), "parameters / tp × bytes", {"parameters": head, "tp": tp})
    if stage.last and shape.other_parameters:
        other = shape.other_parameters
        yield _term("other", other * whole, "parameters × bytes", {"parameters": other, "bytes": whole})


def _term(name: str, size_bytes: int, formula: str, numbers: dict[str, object]) -> Term:
    return Term(Category.PARAMETERS, name, size_bytes, formula, numbers)


def _vocabulary(shape: ModelShape, parameters: int, tp: int) -> int:
    """Return a rank's part of an embedding or head with padded vocabulary; positions and biases are not padded."""
    padded = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    rows = parameters // shape.vocab * shape.vocab if shape.vocab else 0
    width = rows // shape.vocab if shape.vocab else 0
    return -(-padded // tp) * width + (parameters - rows)


def _attention(layer: LayerShape, hidden: int, tp: int) -> int:
    mixer, parameters = layer.attention, layer.attention_parameters
    if mixer is None or tp == 1:
        return parameters
    if mixer.kind is AttentionKind.LATENT:
        whole = hidden * (mixer.query_rank + mixer.latent_rank + mixer.rope_dim)
        return whole + -(-(parameters - whole) // tp)
    if mixer.kind is AttentionKind.RECURRENT:
        return -(-parameters // tp)
    one_head = hidden * (mixer.head_dim + mixer.value_head_dim)
    return max(1, mixer.kv_heads // tp) * one_head + -(-(parameters - mixer.kv_heads * one_head) // tp)

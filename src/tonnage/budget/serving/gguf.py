"""The bytes of a GGUF file, tensor by tensor: a file type is a recipe that assigns each tensor a block type.

"Q4_K_M" stores half of the value and down projections in Q6_K, the output in Q6_K, and the rest in Q4_K, so bits per
weight depend on the model. The recipes are data (`data/gguf.toml`). Custom mixes (Unsloth's "UD") are not known.
"""

from dataclasses import dataclass

from tonnage.budget import table
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape

# Architectures with fused QKV and fused gate and up matrices in their files.
_FUSED = ("phi3", "phimoe", "falcon", "gpt2", "gpt_neox", "bloom", "mpt", "chatglm")
_70B_LAYERS = 80


def file_types() -> tuple[str, ...]:
    """Return the names of the file types."""
    return tuple(table("gguf")["files"])


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer in a file. `experts` counts routed experts only."""

    rest: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.rest + self.experts


def row_bytes(kind: str, row: int) -> int:
    """Return the bytes of a row of a matrix or cache, in the fallback type if the row does not divide into blocks."""
    numbers, size = table("gguf")["blocks"][kind]
    if row % numbers and kind in table("gguf")["fallback"]:
        return row_bytes(table("gguf")["fallback"][kind], row)
    return int(-(-row // numbers) * size)


def _matrix(kind: str, row: int, rows: int) -> int:
    return rows * row_bytes(kind, row)


class GgufRecipe:
    """How a file of one type stores a model."""

    def __init__(self, shape: ModelShape, name: str) -> None:
        self._shape, self._rules = shape, table("gguf")["files"][name]
        self._layers = len(shape.decoder.layers)
        self._alone = len(shape.stacks) == 1  # towers have a file of their own
        mixers = [layer.attention for layer in shape.decoder.layers if layer.attention]
        mlps = [layer.feed_forward for layer in shape.decoder.layers if layer.feed_forward]
        self._grouped = max((mixer.heads // max(mixer.kv_heads, 1) for mixer in mixers), default=1)
        self._experts = max((mlp.experts for mlp in mlps), default=0)

    def kind(self, role: str, number: int = 0) -> str:
        """Return the block type of a tensor in layer `number`."""
        base, layers = str(self._rules["base"]), self._layers
        quantized, eighth, last = base not in ("f32", "f16", "bf16"), layers // 8, 7 * layers // 8
        holds = {
            "all": True,
            "more": number < eighth or number >= last or (number - eighth) % 3 == 2,
            "eighth": number < eighth,
            "sixteenth": number < layers // 16,
            "first2": number < 2,
            "first4": number < 4,
            "middle": eighth <= number < last,
            "grouped": self._grouped >= 4,
        }
        found = next((kind for where, kind in self._rules.get(role, ()) if holds[where]), base)
        if quantized and role in ("k", "v") and self._experts == 8:
            return "q8_0"
        if quantized and role == "o" and self._experts == 8 and base in ("q2_k", "q3_k", "q4_k", "iq3_s", "iq4_xs"):
            return "q5_k"
        if role == "v" and layers == _70B_LAYERS and found in ("q3_k", "q4_k"):
            return "q5_k"
        return str(found)

    def output_kind(self) -> str:
        """Return the block type of the head."""
        usual = "q8_0" if self._shape.hidden % 256 else "q6_k"
        return str(self._rules["output"][0][1]) if self._rules.get("output") else usual

    @property
    def embedding_bytes(self) -> int:
        """The token embedding, which stays on the host."""
        kind = self.output_kind() if self._shape.tied else self.kind("embedding")
        return self._table(self._shape.embedding_parameters, kind)

    @property
    def output_bytes(self) -> int:
        """The head: a copy of the embedding if they are tied."""
        shape = self._shape
        parameters = shape.embedding_parameters if shape.tied else shape.head_parameters
        return self._table(parameters, self.output_kind()) + 4 * self._alone * shape.other_parameters

    def _table(self, parameters: int, kind: str) -> int:
        if not self._shape.vocab or not parameters:
            return 0
        width = min(parameters // self._shape.vocab, self._shape.hidden)
        return _matrix(kind, width, self._shape.vocab) + 4 * self._alone * (parameters - width * self._shape.vocab)

    @property
    def file_bytes(self) -> int:
        """All tensors, tied ones once."""
        ends = self.embedding_bytes + (0 if self._shape.tied else self.output_bytes)
        return ends + sum(self.layer(number).total for number in range(self._layers))

    def layer(self, number: int) -> LayerBytes:
        """Return the bytes of one layer."""
        layer = self._shape.decoder.layers[number]
        rest, experts = self._attention(layer, number) + 4 * layer.norm_parameters, 0
        if (mlp := layer.feed_forward) is not None:
            # A dense MLP, or the shared experts and the router; what is not in matrices has FP32.
            dense = mlp.shared_intermediate if mlp.experts else mlp.intermediate
            each = self._shape.hidden * (3 if mlp.gated else 2)
            routed = mlp.experts * layer.expert_parameters
            others = max(layer.feed_forward_parameters - routed - each * dense, 0)
            rest += self._mlp(dense, mlp.gated, number) + 4 * others
            if mlp.experts:
                experts = mlp.experts * self._mlp(mlp.intermediate, mlp.gated, number, experts=True)
                experts += 4 * mlp.experts * max(layer.expert_parameters - each * mlp.intermediate, 0)
        return LayerBytes(rest, experts)

    def _attention(self, layer: LayerShape, number: int) -> int:
        mixer, hidden = layer.attention, self._shape.hidden
        if mixer is None:
            return 0
        base, parameters = self.kind("attention", number), layer.attention_parameters
        if mixer.kind in (AttentionKind.RECURRENT, AttentionKind.LATENT):
            rows = mixer.heads * mixer.value_head_dim if mixer.kind is AttentionKind.LATENT else 0
            rest = parameters - rows * hidden
            size = _matrix(self.kind("o", number), hidden, rows)
            return size + _matrix(base, hidden, rest // hidden) + 4 * (rest % hidden)
        query, key = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        value = mixer.kv_heads * mixer.value_head_dim
        if self._shape.architecture in _FUSED:
            size = _matrix(self.kind("qkv", number), hidden, query + key + value)
        else:
            parts = (("q", query), ("k", key), ("v", value))
            size = sum(_matrix(self.kind(role, number), hidden, rows) for role, rows in parts)
        size += _matrix(self.kind("o", number), mixer.heads * mixer.value_head_dim, hidden)
        counted = hidden * (query + key + value + mixer.heads * mixer.value_head_dim)
        return size + 4 * max(parameters - counted, 0)

    def _mlp(self, width: int, gated: bool, number: int, *, experts: bool = False) -> int:
        only = self._rules.get("experts") if experts else None
        hidden = self._shape.hidden
        up = _matrix(only or self.kind("up", number), hidden, width)
        gate = _matrix(only or self.kind("gate", number), hidden, width) if gated else 0
        return up + gate + _matrix(only or self.kind("down", number), width, hidden)

"""List the kernels that one micro-batch launches in a layer, the embedding and the head, forward and backward.

Matrix products follow from the model's structure, all other kernels from `data/kernels.toml`, by how the block is
implemented. Sizes may be NumPy arrays, one entry per configuration. This module does not compute times: the clock's
kernels do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from tonnage.budget import table
from tonnage.budget.time.roofline import RATES
from tonnage.budget.training.adapters import ATTENTION, EXPERTS, MLP, NF4_BLOCK
from tonnage.budget.training.configuration import Configuration, Quantity
from tonnage.budget.training.loss import fused_tokens
from tonnage.budget.training.styles import Style, style_of
from tonnage.clock.kernels.rows import softmax_form
from tonnage.clock.launch import Launch
from tonnage.hardware import Gpu
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward, LayerShape, ModelShape

_FP32_BYTES = 4
# Nested operators that the host dispatches for each kind of call, counted in captured steps.
_INNER = {"cast": 3, "product": 7, "attention": 14, "gradient": 4, "attention gradient": 20}
# Transposed operands in BLAS notation: forward, gradient of the input, gradient of the weight.
_LAYOUTS, _TURNED_LAYOUTS = ("tn", "nn", "nt"), ("nn", "tn", "nt")
# Dimensions a kernel iterates over when its tensors have different strides: for heads and for rows.
_HEAD_LOOPS, _ROW_LOOPS = 4, 2
_LAST, _FIRST = 1, 3  # reduced axes, as the clock numbers them
_HOPPER, _BLACKWELL = 9, 10
# One multiply-add and one decay per state element and token, in the forward pass.
_RECURRENT_OPERATIONS = 6
_ALIGNED_BYTES = 16  # rows aligned to this many bytes are read fastest


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """A kernel launch and the host work it costs.

    `operators` are dispatched by the host, `inner` within them, and `in_python` from Python in either pass; `regions`
    counts the compiled regions entered, and `waits` says whether the host blocks until the launch is done.
    """

    launch: Launch | None
    operators: int = 1
    inner: int = 0
    in_python: Quantity = 0
    regions: int = 0
    waits: bool = False
    times: Quantity = 1


# Autograd sets a parameter's gradient, which costs host time only.
_SET_GRADIENT = LaunchCost(None, operators=3, inner=_INNER["cast"])


@dataclass(slots=True)
class PartLaunches:
    """The calls of one part of a micro-batch.

    Two lists are subsets of `products`: `closing`, the last product of a layer, and `second`, every other product,
    which selective recomputation runs again.
    """

    products: list[LaunchCost] = field(default_factory=list)
    attention: list[LaunchCost] = field(default_factory=list)
    others: list[LaunchCost] = field(default_factory=list)
    closing: list[LaunchCost] = field(default_factory=list)
    second: list[LaunchCost] = field(default_factory=list)
    backward: list[LaunchCost] = field(default_factory=list)
    attention_backward: list[LaunchCost] = field(default_factory=list)

    def enter_region(self) -> None:
        """Add the host's overhead of entering a compiled region, forward and backward."""
        for known in (self.others, self.backward):
            known.append(LaunchCost(None, operators=0, regions=1))

    def add(self, other: "PartLaunches", times: Quantity) -> None:
        """Add the calls of another part, repeated `times` times."""
        for name in self.__slots__:
            getattr(self, name).extend(replace(call, times=times * call.times) for call in getattr(other, name))


class _Kernel(NamedTuple):
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    strided: bool
    per_row: bool
    divisor: int


@cache
def _parts() -> dict[str, dict[str, dict[str, list[_Kernel]]]]:
    return {
        part: {how: {way: [_kernel(text) for text in ways[way]] for way in ways} for how, ways in forms.items()}
        for part, forms in table("kernels").items()
    }


@cache
def _kernel(text: str) -> _Kernel:
    """Parse a kernel entry of the data file, like "add c c > c"."""
    body, _, divisor = text.partition(" / ")
    per_row = body.startswith("row ")
    name, *reads = body.removeprefix("row ").partition(">")[0].split()
    writes = body.partition(">")[2].split()
    return _Kernel(name.lstrip("~"), tuple(reads), tuple(writes), name.startswith("~"), per_row, int(divisor or 1))


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """The kernel launches of a model on one GPU, under one or many configurations."""

    shape: ModelShape
    configuration: Configuration
    gpu: Gpu

    @property
    def tokens(self) -> Quantity:
        """Tokens of one micro-batch on one GPU."""
        return self.configuration.tokens

    # ── a layer ──

    def layer(self, layer: LayerShape, hidden: int, memory_tokens: Quantity = 0) -> PartLaunches:
        """Return all calls of a layer. Cross-attention reads `memory_tokens` tokens, or the micro-batch's own if 0."""
        calls, style = PartLaunches(), style_of(self.shape, layer, self.configuration)
        tp = self.configuration.tp
        rows: Quantity = self.tokens / (tp if self.configuration.sequence_parallel else 1)
        # Norms and residual additions.
        branches = sum(part is not None for part in (layer.attention, layer.cross_attention, layer.feed_forward))
        norms, sums = PartLaunches(), PartLaunches()
        self._part(norms, "norm", _norm_form(style, layer), rows, hidden)
        norms.backward += [_SET_GRADIENT] * (1 if layer.rms_norm else 2)
        calls.add(norms, layer.norms)
        how = "fused" if style.fused else "eager"
        self._part(sums, "residual", how, rows, hidden)
        if style.dropout:
            self._part(sums, "dropout", how, rows, hidden)
        calls.add(sums, branches)
        # Everything between them.
        mlp = layer.feed_forward
        # The products add a bias if the layer has more parameters than its matrices.
        matrices = (3 if mlp.gated else 2) * hidden * mlp.intermediate if mlp is not None else 0
        biased = mlp is not None and not mlp.experts and layer.feed_forward_parameters > matrices
        for attention, read in ((layer.attention, 0), (layer.cross_attention, memory_tokens)):
            if attention is not None:
                self._attention(calls, attention, layer, hidden, style, biased, read)
        if mlp is not None:
            products, others = len(calls.products), len(calls.others)
            self._feed_forward(calls, mlp, hidden, style, biased)
            if self.configuration.tiled_mlp:  # recomputed tile by tile in the backward pass
                calls.backward += [*calls.products[products:], *calls.others[others:]]
        # Host work where tensor parallelism splits products.
        forward, backward = self.configuration.traits.split_operators
        for known, operators in ((calls.others, forward), (calls.backward, backward)):
            if operators:
                known.append(LaunchCost(None, operators=0, in_python=operators * (np.asarray(tp) > 1)))
        # Every second product, counting repeated ones.
        before = 0
        for call in calls.products:
            after = before + int(np.max(call.times))
            if count := after // 2 - before // 2:
                calls.second.append(replace(call, times=count))
            before = after
        if self.configuration.compile and self.configuration.framework == "fsdp2":
            calls.enter_region()  # torchtitan compiles block by block
        return calls

    def _attention(
        self, calls: PartLaunches, attention: AttentionShape, layer: LayerShape, hidden: int, style: Style,
        biased: bool, read: Quantity,
    ) -> None:  # fmt: skip
        tp, rows = self.configuration.tp, self.tokens
        queries = attention.heads * attention.head_dim / tp
        # KV heads are replicated if tp exceeds their number.
        keys = np.maximum(attention.kv_heads / tp, 1) * attention.head_dim
        outputs = attention.heads * attention.value_head_dim / tp
        if attention.kind in (AttentionKind.LATENT, AttentionKind.RECURRENT):
            # Many small projections, modelled as one in and one out with the same number of weights.
            width = layer.attention_parameters / (2 * hidden) / tp
            self._product(calls, rows, width, hidden, names=ATTENTION[:3])
            self._product(calls, rows, hidden, width, names=ATTENTION[3:])
        else:
            first = queries + 2 * keys if style.fused_qkv else queries
            names = ATTENTION[:3] if style.fused_qkv else ATTENTION[:1]
            self._product(calls, rows, first, hidden, biased=biased, turned=style.turned, spread="columns", names=names)
            for name in () if style.fused_qkv else ATTENTION[1:3]:
                seen = read if np.any(read) else rows
                self._product(calls, seen, keys, hidden, biased=biased, turned=style.turned, names=(name,))
            self._joined(calls, rows, hidden, 1 if style.fused_qkv else 3)
            self._product(
                calls, rows, hidden, outputs, biased=biased, casts=False, turned=style.turned, spread="rows",
                names=ATTENTION[3:],
            )  # fmt: skip
        native = self.configuration.traits.written == "native" and not self.configuration.compile
        if native:
            self._part(calls, "heads", "all", rows, queries + 2 * keys)
            self._part(calls, "heads", "pair", rows, 2 * keys)
        elif style.fused_qkv and not style.fused:
            calls.backward.append(self._call("join c > c", rows, queries + 2 * keys))
        rotary: str = style.rotary
        if rotary != "none":
            rotary = "fused" if style.fused else "native" if native or style.liger else rotary
        for width in (queries, keys) if attention.head_dim else ():  # Mamba's mixers have no heads
            if style.qk_norm:
                norm = "fused" if style.fused else style.norm
                self._part(calls, "norm", norm, rows * width / attention.head_dim, attention.head_dim)
            self._part(calls, "rotary", rotary, rows * width / attention.head_dim, attention.head_dim)
        if attention.kind is AttentionKind.RECURRENT:
            # A scan, modelled as a product with as many operations.
            operations = 1.0 * _RECURRENT_OPERATIONS * attention.state_elements / tp
            width = np.sqrt(operations / 2)
            for known, times in ((calls.attention, 1), (calls.attention_backward, 2)):
                known.append(LaunchCost(_product(1, rows, width, width, "bf16", "nn-16"), times=times))
        elif style.scores and (style.scores == "eager" or not np.any(read)):
            self._scores(calls, attention, style)
        else:
            self._fused_attention(calls, attention, style, read)

    def _feed_forward(self, calls: PartLaunches, mlp: FeedForward, hidden: int, style: Style, biased: bool) -> None:
        tp, ep, rows = self.configuration.tp, self.configuration.ep, self.tokens
        activation: str = "gated" if mlp.gated else style.activation
        if mlp.gated and style.fused_gate:
            activation = "gated-halves"
        if style.fused or (style.liger and mlp.gated):
            activation = "fused-gated" if mlp.gated else "fused"
        dense = mlp.shared_intermediate if mlp.experts else mlp.intermediate
        both = 2 if mlp.gated else 1
        matrices = 1 if style.fused_gate else both
        if dense:
            for at in range(matrices):
                self._product(
                    calls, rows, both / matrices * dense / tp, hidden, biased=biased, turned=style.turned,
                    spread="columns", names=MLP[:2] if matrices == 1 else MLP[at : at + 1],
                )  # fmt: skip
            self._joined(calls, rows, hidden, matrices)
            self._part(calls, "activation", activation, rows, dense / tp)
            calls.closing = self._product(
                calls, rows, hidden, dense / tp, biased=biased, casts=False, turned=style.turned, spread="rows",
                names=MLP[2:],
            )  # fmt: skip
        if mlp.experts:
            routed, experts = rows * mlp.experts_per_token, mlp.experts / ep
            each, width = routed * ep / mlp.experts, mlp.intermediate / tp
            self._product(calls, rows, mlp.experts, hidden)
            self._part(calls, "mixture", "routing", routed, 1)
            self._part(calls, "mixture", "rows", routed, hidden)
            self._part(calls, "mixture", "widths", routed, width * both)
            # PyTorch multiplies expert by expert where autocast leaves grouped products in FP32, without a kernel.
            known = self.configuration
            wide = known.autocast or (known.compute_bytes == _FP32_BYTES and not known.lora_rank)
            apart = wide and known.traits.written == "transformers" and not known.compile
            product = self._product_by_expert if apart else partial(self._product, names=(EXPERTS,))
            product(calls, each, width * both, hidden, groups=experts)
            self._part(calls, "activation", "gated-experts" if activation == "gated" else activation, routed, width)
            calls.closing = product(calls, each, hidden, width, groups=experts)

    # ── products ──

    def _product(
        self, calls: PartLaunches, rows: Quantity, n: Quantity, k: Quantity, *, groups: Quantity = 1, biased: bool = False,
        casts: bool = True, aligned: int = _ALIGNED_BYTES, wide: bool = False, turned: bool = False, spread: str = "",
        names: tuple[str, ...] = (),
    ) -> list[LaunchCost]:  # fmt: skip
        """Multiply activations by a weight, forward and backward, with the casts and the bias around it.

        Tensor parallelism splits the weight by "columns" or "rows". `names` are the names of a block's matrix, which
        may have an adapter or be quantized.
        """
        config = self.configuration
        precision = "bf16" if wide and config.precision == "fp8" else RATES[config.precision]
        layouts = [f"{layout}-{aligned}" for layout in (_TURNED_LAYOUTS if turned else _LAYOUTS)]
        forward = LaunchCost(_product(groups, rows, n, k, precision, layouts[0], biased), inner=_INNER["product"])
        into = _gradient(groups, rows, k, n, precision, layouts[1])
        weight = _gradient(groups, n, k, rows, precision, layouts[2])
        cuts = config.traits.cuts_products
        calls.products += self._cut(forward) if cuts and spread == "columns" else [forward]
        calls.backward += self._cut(into) if cuts and spread == "rows" else [into]
        if not config.lora_rank:
            calls.backward += [weight, _SET_GRADIENT]
        if biased and not config.lora_rank:
            calls.backward += [self._call("sum_first c", rows, n), _SET_GRADIENT]
            if config.autocast:
                self._cast(calls, n, 1, rows, inputs=False)
        if precision == "fp8":
            # FP8 finds the absolute maximum of each factor, then rewrites the factor.
            for way, sizes in ((calls.others, (rows * k, n * k)), (calls.backward, (rows * n, rows * k, n * k))):
                for size in sizes:
                    way.append(self._call("fused_rows c", groups * size, 1))
                    way.append(self._call("fused c > 1", groups * size, 1))
        if config.autocast:
            self._cast(calls, groups * n, k, rows, inputs=casts and not config.compile)
        made = self._made_wide(groups * n * k) if config.quantized_base and names else []
        calls.others += made
        calls.backward += made
        if config.lora_rank and any(name in config.lora_targets for name in names):
            self._adapter(calls, rows, n, k, groups)
        return [forward, *made]

    def _product_by_expert(
        self, calls: PartLaunches, rows: Quantity, n: Quantity, k: Quantity, *, groups: Quantity
    ) -> list[LaunchCost]:
        """Multiply expert by expert. The host first reads back where each expert's rows end."""
        precision = "tf32" if self.configuration.precision == "tf32" else "fp32"
        shapes = ((rows, n, k, "tn-16"), (rows, k, n, "nn-16"), (n, k, rows, "nt-16"))
        each = (_product(1, m, wide, deep, precision, layout) for m, wide, deep, layout in shapes)
        forward, *backward = (LaunchCost(one, inner=_INNER["gradient"], waits=True, times=groups) for one in each)
        calls.products.append(forward)
        calls.backward += [*backward, _SET_GRADIENT]
        return [forward]

    def _cut(self, product: LaunchCost) -> list[LaunchCost]:
        """Split a product into the rows a GPU owns and the rows that arrive from other ranks, before and after its own."""
        assert product.launch is not None
        batch, rows, n, k = product.launch.shape
        tp = np.asarray(self.configuration.tp)
        sides = np.where(tp > 2, 2, 1)
        others = np.maximum(rows * (tp - 1) / tp / sides, 1)
        own, rest = (
            replace(product.launch, shape=(batch, _whole(part[()]), n, k), operations=2.0 * batch * part * n * k)
            for part in (rows / tp, others)
        )
        return [replace(product, launch=own), replace(product, launch=rest, times=sides * (tp > 1))]

    def _cast(self, calls: PartLaunches, n: Quantity, k: Quantity, rows: Quantity, *, inputs: bool) -> None:
        """Add autocast's casts of the weight and the input, and of their gradients."""
        pairs = [(n, k), (rows, k)] if inputs else [(n, k)]
        for high, wide in pairs:
            calls.others.append(replace(self._call("cast 4 > c", high, wide), operators=0, inner=4))
            calls.backward.append(self._call("cast c > 4", high, wide))

    def _made_wide(self, weights: Quantity) -> list[LaunchCost]:
        """Dequantize a base matrix to 16 bits, as every product does; bitsandbytes dequantizes its scales first."""
        config = self.configuration
        kept, made = config.base_bytes, config.compute_bytes
        sizes = [(weights, kept + made)]
        if config.base == "nf4" and not config.compile:
            scales = weights / NF4_BLOCK
            sizes = [(scales, 1 + _FP32_BYTES), (scales, 2 * _FP32_BYTES), *sizes]
        known: dict[str, Any] = {"kind": "elementwise", "name": "dequantize", "precision": "bf16", "variant": "mixed"}
        launches = [
            Launch(shape=(each, _ROW_LOOPS), moved_bytes=each * moved, operations=2.0 * each, **known)
            for each, moved in sizes
        ]
        return [LaunchCost(launch, inner=_INNER["cast"]) for launch in launches]

    def _adapter(self, calls: PartLaunches, rows: Quantity, n: Quantity, k: Quantity, groups: Quantity) -> None:
        """Add a LoRA adapter: two thin products, scaled and added. PEFT keeps adapters in FP32 if parameters are."""
        rank, compiled = self.configuration.lora_rank, self.configuration.compile
        wide = self.configuration.parameter_bytes > self.configuration.compute_bytes
        own, every = "4" if wide else "c", groups * rows
        if self.configuration.lora_dropout:
            self._part(calls, "dropout", "fused" if compiled else "eager", every, k)
        if compiled:
            forward = [(f"fused c {own} > c", n), *([("fused c > 4", k)] if wide else [])]
            backward = [(f"fused c > {own}", n), (f"fused c {own} > c", k)]
        else:
            forward = [(f"mul {own} > {own}", n), (f"add c {own} > {own}", n)]
            backward = [(f"mul {own} > {own}", n), ("add c c > c", k)]
            if wide:
                forward += [("cast c > 4", k), ("cast 4 > c", n)]
                backward += [("cast 4 > c", k), ("cast c > 4", n)]
        calls.others += [self._call(text, every, width) for text, width in forward]
        calls.backward += [self._call(text, every, width) for text, width in backward]
        precision = "fp32" if wide else RATES[self.configuration.precision]
        for high, deep in ((rank, k), (n, rank)):
            thin = _product(groups, rows, high, deep, precision, "tn-16")
            calls.products.append(LaunchCost(thin, inner=_INNER["product"]))
            calls.backward.append(_gradient(groups, rows, deep, high, precision, "nn-16"))
            calls.backward.append(_gradient(groups, high, deep, rows, precision, "nt-16"))

    def _joined(self, calls: PartLaunches, rows: Quantity, hidden: Quantity, products: int) -> None:
        """Sum the gradients of an input that several products read, in kernels of their own or in the norm's."""
        if products > 1:
            fused = self.configuration.compile or self.configuration.traits.written == "fused"
            added = self._call("fused c" if fused else "add r r > r", rows, hidden)
            calls.backward.append(replace(added, times=products - 1))

    # ── attention ──

    def _fused_attention(self, calls: PartLaunches, attention: AttentionShape, style: Style, read: Quantity) -> None:
        """Add fused attention: one kernel forward, several backward; under context parallelism one per rank."""
        cp, tp, batch = self.configuration.cp, self.configuration.tp, self.configuration.micro_batch
        heads, key_heads = attention.heads / tp, np.maximum(attention.kv_heads / tp, 1)
        rows: Quantity = self.configuration.seq / cp
        reads = bool(np.any(read))
        columns: Quantity = read / batch if reads else rows
        causal, dropout = attention.causal and not reads, style.attention_dropout
        # Compiled transformers models pass a mask, and keys repeated for every head.
        given = self.configuration.framework == "torch" and self.configuration.attention == "flash"
        masked = causal and self.configuration.compile and given
        if masked:
            causal, key_heads = False, heads
            for known in (calls.others, calls.backward):
                known.append(self._call("fused c > c", self.tokens, 2 * heads * attention.head_dim))
        if attention.window and causal:
            # A sliding window is a band, modelled as a rectangle with the same number of pairs.
            window = np.minimum(columns, attention.window)
            causal, columns = False, window - window * window / (2 * columns)
        options = [word for word, is_on in (("causal", causal), ("bias", masked), ("dropout", dropout)) if is_on]
        # cuDNN from Hopper on, FlashAttention before, PyTorch's own for FP32.
        first = _BLACKWELL if self.configuration.attention == "flash-2" else _HOPPER
        has_cudnn = self.gpu.maker == "NVIDIA" and self.gpu.compute_capability[0] >= first and not dropout
        precision, library = RATES[self.configuration.precision], "cudnn" if has_cudnn else "flash"
        if self.configuration.compute_bytes == _FP32_BYTES:
            precision, library = "fp32", "efficient"
        precision = "bf16" if precision == "fp8" else precision
        sizes = (batch, heads, key_heads, rows, columns, attention.head_dim, attention.value_head_dim)
        pairs = rows * columns * (0.5 if causal else 1.0)
        width = attention.head_dim + attention.value_head_dim
        for way, products, kernels, known in (
            ("forward", 2, 1, calls.attention),
            ("backward", 5, 4, calls.attention_backward),
        ):
            shared = 2 * (attention.heads != attention.kv_heads and not masked) if way == "backward" else 0
            launch = Launch(
                kind="attention", name="attention", shape=sizes, precision=precision, kernels=kernels + shared,
                operations=products * batch * heads * pairs * width, variant=" ".join([library, way, *options]),
            )  # fmt: skip
            inner = _INNER["attention" if way == "forward" else "attention gradient"]
            known.append(LaunchCost(launch, operators=5, inner=inner, times=cp))
            if np.any(np.asarray(cp) > 1):
                how = "torch" if self.configuration.traits.parallel == "torch" else "fused"
                wide = heads * attention.value_head_dim
                turn = self._calls(_parts()["ring"][how][way], self.tokens, wide, _ROW_LOOPS)
                known.extend(replace(call, times=cp - 1, operators=0) for call in turn)

    def _scores(self, calls: PartLaunches, attention: AttentionShape, style: Style) -> None:
        """Add unfused attention: two products over every pair, and passes over the scores in memory.

        PyTorch computes the decomposed operators in FP32, in the backward pass too unless autocast casts it.
        """
        seq, tp, batch = self.configuration.seq, self.configuration.tp, self.configuration.micro_batch
        rows, heads = seq / self.configuration.cp, batch * attention.heads / tp
        compute_bytes = self.configuration.compute_bytes
        narrow = RATES[self.configuration.precision]
        narrow = "bf16" if narrow == "fp8" else narrow
        forward = "fp32" if style.scores != "eager" and compute_bytes < _FP32_BYTES else narrow
        backward = narrow if self.configuration.autocast else forward
        wide_bytes, narrow_bytes = (_FP32_BYTES if one == "fp32" else compute_bytes for one in (forward, backward))
        key, value = attention.head_dim, attention.value_head_dim
        for n, k, layout in ((seq, key, "tn"), (value, seq, "nn")):
            launch = _product(heads, rows, n, k, forward, f"{layout}-{self._aligned(seq, wide_bytes)}")
            calls.attention.append(LaunchCost(launch, operators=2, inner=7))
            for m, wide, deep, layout in ((rows, k, n, "nn"), (n, k, rows, "nt")):
                launch = _product(heads, m, wide, deep, backward, f"{layout}-{self._aligned(seq, narrow_bytes)}")
                calls.attention_backward.append(LaunchCost(launch, operators=3, inner=2))
        scores = PartLaunches()
        widened = style.scores == "math" and compute_bytes < _FP32_BYTES
        how = "widened" if widened else style.scores
        self._part(scores, "scores", how, heads * rows, seq)
        if style.attention_dropout:
            dropout = {"apart": "fused-dropout", "widened": "wide-dropout"}.get(how, "dropout")
            self._part(scores, "scores", dropout, heads * rows, seq)
        if style.scores != "eager":
            width = key if widened else 2 * key + value
            self._part(scores, "heads", how, self.tokens, width * attention.heads / tp)
        calls.attention += scores.others
        calls.attention_backward += scores.backward

    def _aligned(self, columns: Any, size_bytes: int) -> int:
        """Return the alignment in bytes of rows with `columns` elements, capped at what product kernels distinguish."""
        return int(np.gcd.reduce(np.append(np.asarray(columns, int).ravel() * size_bytes, _ALIGNED_BYTES)))

    # ── outside the layers ──

    def embedding(self) -> PartLaunches:
        """Return the calls of the embedding lookup and of its gradient, which is summed into a zeroed table."""
        calls = PartLaunches()
        hidden = self.shape.stacks[0].hidden
        if not self.configuration.compile:
            self._part(calls, "start", "eager", self.tokens, 1)
        else:
            calls.enter_region()
        calls.others.append(self._call("gather r > r", self.tokens, hidden))
        if not self.configuration.lora_rank and self.shape.vocab:
            calls.backward.append(self._call("embedding_backward r", self.tokens, hidden))
            table = self.shape.vocab / self.configuration.tp
            calls.backward.append(self._call("fill > r", table, hidden))
            if self.shape.tied:
                calls.backward.append(self._call("add r r > r", table, hidden))
        return calls

    def head_form(self, tp: int) -> tuple[object, ...]:
        """Return what determines the head's kernels when logits are split `tp` ways."""
        width = int(self._logits_width(tp))
        ways = [(size, backward) for size in (2, _FP32_BYTES) for backward in (False, True)]
        return self._aligned(width, self.configuration.compute_bytes), *(
            softmax_form(width, size, backward=backward) for size, backward in ways
        )

    def _logits_width(self, tp: Any) -> Any:
        width = np.ceil(self.shape.vocab / np.asarray(tp))
        # Inductor pads the width.
        return np.ceil(width / _ALIGNED_BYTES) * _ALIGNED_BYTES if self.configuration.compile else width

    def head(self) -> PartLaunches:
        """Return the calls of final norm, logits and loss, if any. Configurations must share one `head_form`."""
        calls, shape, rows = PartLaunches(), self.shape, self.tokens * self.configuration.logit_share
        if not (shape.logits and shape.vocab):
            return calls
        last = shape.decoder.layers[-1]
        style = style_of(shape, last, self.configuration)
        self._part(calls, "norm", _norm_form(style, last), rows, shape.hidden)
        width = self._logits_width(self.configuration.tp)
        at_once = fused_tokens(shape, rows) if self.configuration.loss == "fused" else rows
        one = PartLaunches()
        self._product(
            one, at_once, width, shape.hidden, aligned=self._aligned(width, self.configuration.compute_bytes), wide=True,
            biased=shape.head_parameters % shape.hidden != 0,
        )  # fmt: skip
        calls.add(one, rows / at_once)
        written = self.configuration.traits.written
        compiled = self.configuration.compile and self.configuration.compile_loss
        loss = "causal" if shape.decoder.causal else "plain"
        if written == "fused" or compiled or self.configuration.loss == "fused":
            loss = "fused"
        elif written == "native":
            loss = "split"
        self._part(calls, "loss", loss, rows, width)
        return calls

    # ── kernels of the data file ──

    def _part(self, calls: PartLaunches, part: str, how: str, rows: Quantity, columns: Quantity) -> None:
        ways = _parts()[part][how]
        loops = _HEAD_LOOPS if part == "rotary" else _ROW_LOOPS
        calls.others += self._calls(ways["forward"], rows, columns, loops)
        calls.backward += self._calls(ways["backward"], rows, columns, loops)

    def _calls(self, kernels: Iterable[_Kernel], rows: Quantity, columns: Quantity, loops: int) -> Iterator[LaunchCost]:
        # Bytes per element for each type letter of the data file.
        compute = self.configuration.compute_bytes
        wide = _FP32_BYTES if self.configuration.autocast else compute
        widths = {"c": compute, "r": wide, "f": wide, "4": _FP32_BYTES, "1": 1}
        for kernel in kernels:
            if kernel.name == "view":
                yield LaunchCost(None)
                continue
            reads, writes = ([widths[letter] for letter in letters] for letters in (kernel.reads, kernel.writes))
            if kernel.name != "cast" or reads != writes:
                inner = _INNER["cast"] if kernel.name == "cast" else 0
                yield LaunchCost(_launch(kernel, reads, writes, rows, columns, loops), inner=inner)

    def _call(self, text: str, rows: Quantity, columns: Quantity) -> LaunchCost:
        """Build the call of one kernel, written as in the data file."""
        (call,) = self._calls([_kernel(text)], rows, columns, _ROW_LOOPS)
        return call


def _norm_form(style: Style, layer: LayerShape) -> str:
    native_rms = style.norm == "native" and layer.rms_norm
    return "fused" if style.fused else "native-rms" if native_rms else style.norm


def _product(
    batch: Quantity, m: Quantity, n: Quantity, k: Quantity, precision: str, variant: str, biased: bool = False
) -> Launch:
    sizes = tuple(_whole(size) for size in (batch, m, n, k))
    operations = 2.0 * batch * m * n * k
    name = "addmm" if biased else "mm"
    return Launch(kind="matmul", name=name, shape=sizes, precision=precision, operations=operations, variant=variant)


def _gradient(batch: Quantity, m: Quantity, n: Quantity, k: Quantity, precision: str, variant: str) -> LaunchCost:
    """Return the call of a product in the backward pass."""
    return LaunchCost(_product(batch, m, n, k, precision, variant), operators=3, inner=_INNER["gradient"])


def _whole(size: Quantity) -> Any:
    """Round up: part of a row or of an expert counts as a whole one."""
    return np.ceil(size) if isinstance(size, np.ndarray) else int(np.ceil(size))


def _launch(
    kernel: _Kernel, reads: list[int], writes: list[int], rows: Quantity, columns: Quantity, loops: int = _ROW_LOOPS
) -> Launch:
    """Convert a kernel of the data file to a launch over `rows` and `columns`."""
    elements: Quantity = rows / kernel.divisor if kernel.per_row else rows * columns / kernel.divisor
    moved, accesses = elements * sum(reads + writes), elements * (len(reads) + len(writes))
    narrow = "_narrow" if (reads + writes)[:1] < [_FP32_BYTES] else "_wide"
    precision, kernels, blocks, kind = "bf16" if narrow == "_narrow" else "fp32", 1, rows, "norm"
    match kernel.name:
        case "mean" | "sum_last" | "sum_first":
            first = kernel.name == "sum_first"
            shape = (_whole(columns), _whole(rows), _FIRST) if first else (_whole(rows), _whole(columns), _LAST)
            return Launch(
                kind="reduction", name="sum", shape=shape, precision=precision, moved_bytes=moved + shape[0] * reads[0],
                operations=elements, variant="sum_first" if first else "sum_last",
            )  # fmt: skip
        case "softmax" | "softmax_backward":
            variant = softmax_form(int(np.max(columns)), reads[0], backward=kernel.name.endswith("backward"))
            blocks = np.ceil(rows / 8) if "warp" in variant else rows
        case "layer_norm" | "rms_norm":
            variant = f"{kernel.name}{narrow}"
        case "layer_norm_backward":
            variant, kernels = f"layer_norm_backward{narrow}+norm_weight", 2
        case "nll" | "nll_backward":
            kind, variant = "loss", kernel.name.replace("nll", "nll_loss")
            elements, moved, blocks = rows, rows * 40.0, 1
        case "gather":
            kind, variant = "indexing", "taken"
        case "added":
            kind, variant = "indexing", f"added{narrow}"
        case "embedding_backward":
            kind, variant, kernels, moved = "indexing", "embedding_backward+sorted_numbers", 26, 3 * moved
        case name if name.startswith("fused"):
            kind, variant = "fused", "fused_rows" if "rows" in name else "fused"
        case "fill":
            kind, variant = "elementwise", "written"
        case "join" if not kernel.strided:
            kind, variant = "elementwise", "joined_rows" if isinstance(columns, int) else "joined"
        case "dropout":
            kind, variant = "elementwise", "random"
        case _:
            # PyTorch chooses the kernel by whether dtypes and strides differ.
            widths = {width for width in reads + writes if width > 1}
            mixed = len(widths) > 1 and not (kernel.name == "cast" and reads > writes)
            variant = "mixed" if mixed else "vector"
            if kernel.strided:
                narrow = "narrow" if min(widths) < _FP32_BYTES else "wide"
                variant = f"strided_{'mixed' if mixed else narrow}"
            kind, blocks = "elementwise", loops
    name = "copy_" if kernel.name in ("cast", "copy") else kernel.name
    return Launch(
        kind=kind, name=name, shape=(elements, blocks), precision=precision, moved_bytes=moved,  # type: ignore[arg-type]
        operations=accesses, variant=variant, kernels=kernels,
    )  # fmt: skip

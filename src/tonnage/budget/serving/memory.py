"""What serving a model takes on each GPU, how many blocks are left for its KV cache, and how many users fit.

Engines account differently for the same parts: see `budget.serving.vllm`, `budget.serving.sglang`, `budget.serving.tensorrt_llm`,
`budget.serving.own_engine` (Tonnage's own, which takes a share of the whole card including its CUDA context and runs on one
GPU) and `budget.serving.llama_cpp` (which splits a model between GPU and host). vLLM and Tonnage reserve one block as the null
block for padding.

Figures are those of the pipeline stage with room for the fewest blocks, since all stages share one block count. This
module does not choose a layout: `planner.serving.search` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tonnage.budget import largest, table
from tonnage.budget.serving import own_engine, sglang, tensorrt_llm, vllm
from tonnage.budget.serving.kv_cache import KV_FORMATS, KvFormat, KvLayout, kv_heads_of, kv_layout, state_bytes
from tonnage.budget.serving.weights import WEIGHT_FORMATS, StageLayers, stages, weight_terms
from tonnage.budget.terms import Term
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import Gpu
from tonnage.ledger import Category, Ledger
from tonnage.models.shape import AttentionKind, AttentionShape, ModelShape

Engine = Literal["tonnage", "vllm", "sglang", "tensorrt-llm", "llama.cpp"]

BLOCK = 16
LONGEST_CONTEXT = 2**30
# KV cache formats that only llama.cpp has.
GGML_CACHES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfiguration:
    """A serving configuration on `tp × pp` GPUs. Fields that are 0 or empty take the engine's default (`resolved`)."""

    engine: Engine = "vllm"
    engine_version: str = ""
    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()  # per pipeline stage; empty: the engine's split
    context: int = 8192
    users: int = 1
    shared_prefix: int = 0  # prompt tokens that all users share
    weights: str = ""  # empty: the checkpoint's
    kv: str = ""  # empty: the compute dtype
    block: int = BLOCK
    utilization: float = 0.0
    max_seqs: int = 0
    batched_tokens: int = 0
    eager: bool = False
    reserved_bytes: int = 0  # per card, used by others: another engine, a desktop
    gpu_layers: int = -1  # llama.cpp: layers on the cards, including the head; -1: as many as fit
    cpu_experts: int = 0  # llama.cpp: layers whose experts stay on the host
    flash_attention: bool = True  # llama.cpp: without it, scores of a whole batch are kept

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in a forward pass."""
        return 4 if self.weights == "fp32" else 2

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def eight_bit(self) -> bool:
        """Whether Tonnage's own engine stores the layers' matrices in 8 bits."""
        return self.weights in ("fp8", "int8")

    @property
    def rows(self) -> int:
        """The most sequences that sample a token in one step."""
        return min(self.max_seqs, self.batched_tokens)

    @property
    def columns(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.context // self.block)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine's memory. `held` and `inside` count against its share, `limit_bytes`; `outside` does not."""

    held: list[Term]
    inside: list[Term]
    outside: list[Term]
    limit_bytes: int

    @property
    def available_bytes(self) -> int:
        """Bytes left for the KV cache; negative if the other parts exceed the share."""
        return self.limit_bytes - sum(int(term.size_bytes) for term in (*self.held, *self.inside))


@dataclass(frozen=True, slots=True)
class KvPool:
    """The blocks of the KV cache. `usable_blocks` excludes the null block."""

    layout: KvLayout
    available_bytes: int
    blocks: int
    usable_blocks: int
    batched_tokens: int

    @property
    def tokens(self) -> int:
        """Token capacity, logged by vLLM as "GPU KV cache size"."""
        return self.layout.tokens(self.blocks)

    def max_concurrency(self, context: int) -> float:
        """Return how many sequences of that length fit at once, as vLLM logs it."""
        return self.blocks / max(self.layout.sequence_blocks(context, self.batched_tokens), 1)

    def holds(self, users: int, context: int, prefix: int = 0) -> bool:
        """Say whether all users fit at once."""
        return self.layout.needed_blocks(users, context, self.batched_tokens, prefix) <= self.usable_blocks

    def most_users(self, context: int, prefix: int = 0) -> int:
        """Return how many sequences of that length fit at once."""
        shared = self.layout.shared_blocks(min(prefix, context))
        own = self.layout.sequence_blocks(context, self.batched_tokens) - shared
        free = self.usable_blocks - shared
        return max(free // own, 0) if own else LONGEST_CONTEXT * (free >= 0)

    def longest_context(self, users: int, prefix: int = 0) -> int:
        """Return the longest context at which `users` sequences fit; 0 if not even one token does."""
        return largest(0, LONGEST_CONTEXT, lambda context: self.holds(users, context, prefix))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBudget:
    """The budget of the fullest GPU. `terms` sum to its use, KV cache included; `limit_bytes` is the engine's share.

    `outside_bytes` lies beyond that share (vLLM's CUDA context; its CUDA graphs before 0.20).
    """

    configuration: ServingConfiguration
    capacity_bytes: int
    limit_bytes: int
    outside_bytes: int
    terms: tuple[Term, ...]
    kv: KvPool
    notes: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger:
        """Bytes by category."""
        return Ledger.of((term.category, int(term.size_bytes)) for term in self.terms)

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(int(term.size_bytes) for term in self.terms)

    @property
    def needed_blocks(self) -> int:
        """Blocks needed for all users at once, plus the null block."""
        asked = self.configuration
        batched, prefix = self.kv.batched_tokens, asked.shared_prefix
        null = self.kv.blocks - self.kv.usable_blocks
        return self.kv.layout.needed_blocks(asked.users, asked.context, batched, prefix) + null

    @property
    def needed_bytes(self) -> int:
        """Bytes needed with a KV cache just large enough; the engine's whole use if that exceeds the card."""
        pool = self.kv.blocks * self.kv.layout.bytes_per_block
        needed = self.total_bytes - pool + self.needed_blocks * self.kv.layout.bytes_per_block
        return max(needed, self.total_bytes) if self.overflows else needed

    @property
    def overflows(self) -> bool:
        """Whether the engine's share and what lies outside it exceed the memory available to it."""
        return self.total_bytes > self.room_bytes

    @property
    def room_bytes(self) -> int:
        """Card memory that others do not use."""
        return max(self.capacity_bytes - self.configuration.reserved_bytes, 0)

    @property
    def largest_utilization(self) -> float:
        """The largest utilization, in hundredths, that leaves room for what lies outside it."""
        return max(self.room_bytes - self.outside_bytes, 0) * 100 // self.capacity_bytes / 100

    @property
    def available_bytes(self) -> int:
        """What the engine may use: its share and what lies outside it, but never more than the card."""
        return min(self.limit_bytes + self.outside_bytes, self.room_bytes)

    @property
    def fits(self) -> bool:
        """Whether the engine starts and all users fit at once."""
        asked = self.configuration
        return not self.overflows and self.kv.holds(asked.users, asked.context, asked.shared_prefix)


def serving_budget(shape: ModelShape, config: ServingConfiguration, gpu: Gpu) -> ServingBudget:
    """Return the budget of the stage with the fewest blocks, or of the fullest stage if none has any."""
    check(shape, config)
    if "bf16" in (config.weights, config.kv) and not gpu.has_bf16:
        raise RequestError(f"{gpu.name} has no BF16.", hint="Use fp16, or leave the flag out.")
    asked = resolved(shape, config, gpu)
    if asked.engine == "tonnage":
        own_engine.check_formats(asked.weights, asked.kv)
    each = [stage_budget(shape, stage, asked, gpu) for stage in stages(shape, asked.pp, asked.stage_layers)]
    return min(each, key=lambda budget: (not budget.overflows, budget.kv.blocks, -budget.total_bytes))


def resolved(shape: ModelShape, asked: ServingConfiguration, gpu: Gpu) -> ServingConfiguration:
    """Return the configuration with the engine's defaults filled in."""
    half = "bf16" if gpu.has_bf16 else "fp16"
    weights = asked.weights or (shape.dtype if shape.dtype in WEIGHT_FORMATS else half)
    if not asked.weights and (weights == "bf16" or (weights == "fp32" and asked.engine != "tonnage")):
        weights = half  # vLLM, SGLang and TensorRT-LLM serve an FP32 checkpoint in 16 bits
    known = replace(asked, weights=weights, kv=asked.kv or (weights if weights in ("fp32", "fp16", "bf16") else half))
    usual: dict[str, Any] = {}
    match asked.engine:
        case "llama.cpp":
            from tonnage.budget.serving.llama_cpp import resolved as resolved_llama

            return resolved_llama(shape, asked)
        case "tonnage":
            known = replace(known, engine_version="")
            usual |= {"utilization": own_engine.UTILIZATION, "max_seqs": max(own_engine.MAX_SEQS, asked.users)}
            usual |= {"batched_tokens": own_engine.BATCHED_TOKENS}
        case "sglang":
            version = asked.engine_version or sglang.latest_version()
            known = replace(
                known, engine_version=version, block=1 if asked.block == BLOCK else asked.block,
                max_seqs=asked.max_seqs or max(sglang.LEAST_RUNNING, asked.users),
                batched_tokens=asked.batched_tokens or int(sglang.card_row(version, gpu)["chunk"]),
            )  # fmt: skip
            usual |= {"utilization": asked.utilization or sglang.default_fraction(shape, known, gpu)}
        case "tensorrt-llm":
            facts = tensorrt_llm.defaults()
            known = replace(known, block=facts["block"] if asked.block == BLOCK else asked.block)
            usual |= {"engine_version": facts["latest"], "utilization": facts["fraction"]}
            usual |= {"max_seqs": max(facts["max_seqs"], asked.users), "batched_tokens": facts["batched_tokens"]}
        case "vllm":
            release = vllm.find_release(version := asked.engine_version or vllm.latest_version())
            max_seqs = asked.max_seqs or max(release.max_seqs[vllm.card_class(release, gpu)], asked.users)
            batched = asked.batched_tokens or vllm.default_batched_tokens(release, gpu, asked.context, max_seqs)
            usual |= {"engine_version": version, "utilization": release.utilization, "batched_tokens": batched}
            usual |= {"max_seqs": min(max_seqs, max(batched, asked.users))}
    return replace(known, **{name: getattr(asked, name) or value for name, value in usual.items()})


def check(shape: ModelShape, asked: ServingConfiguration) -> None:
    """Raise RequestError for a configuration that no engine could start."""
    if not shape.decoder.causal or not shape.logits or not shape.vocab:
        raise RequestError(f"{shape.name} writes no tokens, so there is nothing to serve from a KV cache.")
    for name in ("tp", "pp", "context", "users", "block", "max_seqs", "batched_tokens"):
        flag, number = f"--{name.replace('_', '-')}", getattr(asked, name)
        if number < 1 and (number or name not in ("max_seqs", "batched_tokens")):
            raise RequestError(f"{flag} {number} makes no sense.", hint=f"Give {flag} at least 1.")
        if number > LONGEST_CONTEXT:
            most = f"{LONGEST_CONTEXT:,}"
            raise RequestError(f"{flag} {number:,} is beyond counting.", hint=f"Give {flag} at most {most}.")
    if not 0 <= asked.utilization <= 1:
        raise RequestError(f"--utilization {asked.utilization} is no share of a card.", hint="Write it like 0.9.")
    if not 0 <= asked.shared_prefix <= asked.context:
        problem = f"A shared prefix of {asked.shared_prefix} tokens does not lie within a context of {asked.context}."
        raise RequestError(problem, hint="Give --prompt-shared at most the --context.")
    if shape.learned_positions and asked.context > shape.max_positions:
        problem = f"{shape.name} has learned {shape.max_positions:,} positions:"
        hint = f"Give --context at most {shape.max_positions}."
        raise RequestError(f"{problem} a context of {asked.context:,} goes beyond them.", hint=hint)
    _check_layout(shape, asked)
    caches = (*KV_FORMATS, *GGML_CACHES)
    for flag, name, known in (("--weights", asked.weights, tuple(WEIGHT_FORMATS)), ("--kv", asked.kv, caches)):
        if name and name not in known:
            raise RequestError(f"{flag} {name} is not known.", hint=f"Use one of: {', '.join(known)}.")
    if asked.engine in ("sglang", "tensorrt-llm") and asked.kv == "int4":
        raise RequestError(f"--engine {asked.engine} has no INT4 KV cache.", hint="Use --kv fp8.")
    if asked.kv in GGML_CACHES and asked.engine != "llama.cpp":
        raise RequestError(f"Only llama.cpp keeps a cache in {asked.kv}.", hint="Use --kv fp8, or --engine llama.cpp.")
    version = asked.engine_version or vllm.latest_version()
    if asked.engine == "vllm" and asked.kv == "int4" and not vllm.find_release(version).int4_kv:
        raise RequestError(f"vLLM {version} has no INT4 KV cache.", hint="Use --kv fp8, or --engine-version 0.25.")


def _check_layout(shape: ModelShape, asked: ServingConfiguration) -> None:
    layers = len(shape.decoder.layers)
    if asked.pp > layers:
        raise BadLayout(f"--pp {asked.pp}: {shape.name} has only {layers} layers.", hint=f"Give --pp at most {layers}.")
    cut = asked.stage_layers
    if cut and (len(cut) != asked.pp or sum(cut) != layers or min(cut) < 1):
        hint = f"Give --pp {asked.pp} numbers, each at least 1, that sum to {layers}."
        words = f"Stages of {', '.join(map(str, cut))} layers do not cut"
        raise BadLayout(f"{words} the {layers} layers of {shape.name} into {asked.pp}.", hint=hint)
    if asked.engine == "tonnage" and asked.gpus > 1:
        raise BadLayout("Tonnage's own engine serves from one GPU.", hint="Use --engine vllm, or --tp 1 --pp 1.")
    if not divides(shape, asked.tp):
        heads = sorted({(mixer.heads, mixer.kv_heads) for mixer in _mixers(shape)})
        words = ", ".join(f"{queries} query and {keys} KV heads" for queries, keys in heads)
        good = [tp for tp in range(1, heads[0][0] + 1) if divides(shape, tp)]
        hint = f"Use one of --tp {', '.join(map(str, good[:8]))}."
        raise BadLayout(f"--tp {asked.tp} does not divide {shape.name}, which has {words}.", hint=hint)


def divides(shape: ModelShape, tp: int) -> bool:
    """Say whether heads split evenly: KV heads over ranks, or ranks over KV heads."""
    return all(
        mixer.heads % tp == 0 and (mixer.kv_heads % tp == 0 or tp % mixer.kv_heads == 0)
        for mixer in _mixers(shape)
        if mixer.heads and mixer.kv_heads
    )


def _mixers(shape: ModelShape) -> Iterator[AttentionShape]:
    for layer in {id(layer): layer for layer in shape.decoder.layers}.values():
        if layer.attention is not None:
            yield layer.attention


def stage_budget(shape: ModelShape, stage: StageLayers, asked: ServingConfiguration, gpu: Gpu) -> ServingBudget:
    """Return the budget of one pipeline stage for a `resolved` configuration."""
    parts = _parts(shape, stage, asked, gpu)
    kv = _pool(shape, stage, asked, parts.available_bytes)
    numbers: dict[str, object] = {
        "share_bytes": parts.limit_bytes, "available_bytes": max(parts.available_bytes, 0), "blocks": kv.blocks,
        "bytes_per_block": kv.layout.bytes_per_block, "block": kv.layout.block,
        "a_token_keeps": " + ".join(_token_words(stage, asked)),
    }  # fmt: skip
    size = kv.blocks * kv.layout.bytes_per_block
    pool = Term(Category.KV_CACHE, "pool", size, "(share − the rest) // bytes per block × bytes per block", numbers)
    return ServingBudget(
        configuration=asked, capacity_bytes=gpu.memory_bytes, limit_bytes=parts.limit_bytes,
        outside_bytes=sum(int(term.size_bytes) for term in parts.outside),
        terms=(*parts.held, pool, *parts.inside, *parts.outside), kv=kv, notes=tuple(_notes(shape, asked, gpu)),
    )  # fmt: skip


def _formats(engine: Engine) -> dict[str, KvFormat]:
    return own_engine.OWN_KV_FORMATS if engine == "tonnage" else KV_FORMATS


def _token_words(stage: StageLayers, asked: ServingConfiguration) -> Iterator[str]:
    """Yield the arithmetic of one token on one GPU, like "32 layers × 8 heads × (128 + 128) × 16 bits"."""
    form = _formats(asked.engine)[asked.kv]
    scales = f" with {form.scale_bytes} B of scales a vector" if form.scale_bytes else ""
    for layer, count in stage.kinds:
        mixer = layer.attention
        if mixer is None:
            continue
        if mixer.kind is AttentionKind.RECURRENT:
            yield f"{count} layers × a state of {state_bytes(mixer, asked.tp):,} B"
        elif mixer.kind is AttentionKind.LATENT:
            yield f"{count} layers × ({mixer.latent_rank} + {mixer.rope_dim}) × {form.bits} bits{scales}"
        else:
            heads, window = kv_heads_of(mixer, asked.tp), f" (window {mixer.window})" if mixer.window else ""
            size = f"({mixer.head_dim} + {mixer.value_head_dim})"
            yield f"{count} layers × {heads} heads × {size} × {form.bits} bits{scales}{window}"


def _pool(shape: ModelShape, stage: StageLayers, asked: ServingConfiguration, available: int) -> KvPool:
    release = vllm.find_release(asked.engine_version) if asked.engine == "vllm" else None
    layout = kv_layout(
        stage.kinds, _formats(asked.engine)[asked.kv], block=asked.block, tp=asked.tp, grouped=bool(release and release.grouped),
        extra_bytes=vllm.INDEX_BYTES.get(shape.architecture, 0) if asked.engine != "tonnage" else 0,
    )  # fmt: skip
    if asked.engine == "sglang":
        # Sliding-window layers have a pool of their own, with `ratio` times the tokens of the other.
        layers = sum(count for layer, count in stage.kinds if layer.attention is not None)
        windows = sum(count for layer, count in stage.kinds if layer.attention and layer.attention.window)
        if shape.architecture in table("sglang")["swa_architectures"] and 0 < windows < layers:
            ratio = float(table("sglang")["swa_ratio"])
            kept = int(layout.bytes_per_block * (layers - (1 - ratio) * windows) / layers)
            layout = replace(layout, bytes_per_block=kept)
    blocks = max(available, 0) // layout.bytes_per_block if layout.bytes_per_block else 0
    null = 0 if asked.engine in ("sglang", "tensorrt-llm") or (release and release.generation == "V0") else 1
    return KvPool(layout, max(available, 0), blocks, max(blocks - null, 0), asked.batched_tokens)


def _parts(shape: ModelShape, stage: StageLayers, asked: ServingConfiguration, gpu: Gpu) -> Parts:
    """Return the parts of an engine's memory, by what it takes its share of."""
    context, linked = own_engine.context_term(gpu), sglang.linked_term(asked.tp, gpu)
    share = own_engine.share_bytes(gpu.memory_bytes, asked.utilization)
    if asked.engine == "tonnage":
        # A share of the card, against which everything counts.
        reserve = own_engine.own_reserve(own_engine.widths_of(shape), asked, gpu)
        return Parts(list(own_engine.own_weight_terms(shape, asked.weights)), list(reserve), [], share)
    form = WEIGHT_FORMATS[asked.weights]
    kernel = vllm.expert_kernel(gpu) if form.experts_only else None
    held = list(weight_terms(shape, stage, asked.tp, form, kernel))
    if asked.engine == "sglang":
        # A share of the memory free before loading; all but weights and KV cache lies outside it.
        free = gpu.memory_bytes - asked.reserved_bytes - gpu.overheads["context"].size_bytes - int(linked.size_bytes)
        context, kernels = sglang.context_terms(gpu)
        outside = [context, linked, *sglang.reserve_terms(shape, stage, asked, gpu)]
        return Parts(held, [kernels], outside, max(int(free * asked.utilization), 0))
    if asked.engine == "tensorrt-llm":
        # A share of the memory free at the peak of a dry run.
        inside = [context, linked, *tensorrt_llm.dry_run_terms(shape, stage, asked, gpu)]
        peak = sum(int(term.size_bytes) for term in (*held, *inside))
        free = max(gpu.memory_bytes - asked.reserved_bytes - peak, 0)
        return Parts(held, inside, [], peak + int(free * asked.utilization))
    # vLLM's is a share of the card, and the CUDA context lies outside it.
    inside, outside = list(vllm.profiling_terms(shape, stage, asked, gpu)), [context]
    graphs = vllm.graphs_term(shape, stage, asked)
    (inside if vllm.find_release(asked.engine_version).graphs_subtracted else outside).append(graphs)
    return Parts(held, inside, outside, share)


def _notes(shape: ModelShape, asked: ServingConfiguration, gpu: Gpu) -> Iterator[str]:
    if asked.engine == "vllm" and gpu.runs_cuda and gpu.compute_capability < vllm.LEAST_CAPABILITY:
        yield f"vLLM does not start on {gpu.name}: it needs compute capability 7.0, and this is {gpu.architecture}"
    if asked.engine == "tensorrt-llm" and (not gpu.runs_cuda or gpu.compute_capability < tensorrt_llm.LEAST_CAPABILITY):
        yield f"TensorRT-LLM does not start on {gpu.name}: it needs an NVIDIA card of Ampere or later"
    if asked.engine == "sglang" and (gpu.maker == "Apple" or (gpu.runs_cuda and gpu.compute_capability < (7, 5))):
        yield f"SGLang does not start on {gpu.name}: it needs an NVIDIA card of Turing or later, or AMD's Instinct"
    if asked.engine == "vllm" and gpu.maker == "Apple":
        yield "vLLM runs on Apple's GPUs by its plugin vllm-metal: what it takes beside weights and cache is not known there"
    if not gpu.has_bf16 and "fp16" in (asked.weights, asked.kv) and shape.dtype != "fp16":
        yield f"{gpu.name} has no BF16: FP16 is used in its place"
    if shape.dtype == "fp32" and asked.weights in ("bf16", "fp16"):
        yield f"the checkpoint keeps FP32, which is served in {asked.weights.upper()}: --weights fp32 keeps it"
    if shape.max_positions and asked.context > shape.max_positions:
        yield f"the model states {shape.max_positions:,} positions: a context of {asked.context:,} needs its rope scaled"
    if asked.users > asked.max_seqs:
        yield f"--max-seqs {asked.max_seqs} serves fewer sequences at once than --users {asked.users}"
    if any(layer.cross_attention for layer in shape.decoder.layers):
        yield "the keys and values of cross-attention are not counted"
    if shape.dtype not in WEIGHT_FORMATS:
        yield f"the checkpoint keeps {shape.dtype}, which is no format of weights: counted as {asked.weights}"
    if not shape.exact and not shape.notes:
        yield "this architecture is not known exactly: its weights are counted as those of the closest one"
    yield from shape.notes

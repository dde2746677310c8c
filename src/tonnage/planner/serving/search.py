"""Lay out a model for serving on the available GPUs: given settings are kept, open ones are searched.

Searched are tensor and pipeline parallelism, the split of layers into stages, and the number of replicas; layouts that
vLLM would not start are left out (`planner.serving.splitting`). Of the layouts that hold all users, the one with the highest
upper bound of decoded tokens per second wins: weights and cache read once a step at memory bandwidth, and two
all-reduces per layer. The bound ranks layouts; it is no prediction. An engine's share of the card defaults to its own,
or less if the card would not hold what lies outside it. If nothing fits, changes are tried one at a time and those that
help are offered; if it fits, those that leave more room.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tonnage.budget.demands import Demand, shortages
from tonnage.budget.loading import Loading, serving_loading
from tonnage.budget.serving.llama_cpp import MARGIN_BYTES, LlamaBudget, llama_budget
from tonnage.budget.serving.memory import (
    BLOCK,
    GGML_CACHES,
    ServingBudget,
    ServingConfiguration,
    resolved,
    serving_budget,
)
from tonnage.budget.serving.own_engine import OWN_WEIGHTS
from tonnage.budget.serving.vllm import GRAPHS, latest_version
from tonnage.budget.serving.weights import WEIGHT_FORMATS, stages
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import Cluster
from tonnage.hardware.cluster import common_clusters
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, ModelShape
from tonnage.planner.serving.splitting import cut, splits
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.planner.export import ServingLaunch
    from tonnage.planner.serving.beside import Neighbour

# Latency of a small all-reduce over NVLink, whatever its size.
_ALL_REDUCE_S = 10e-6
_MOST_TIMES_GPUS = 64
# How many format changes to offer, and how much more a KV cache must hold to be worth a line.
_MOST_TRIALS = 2
# How many layouts that nearly fit get their layers split anew.
_MOST_CUT = 3
_WORTH_SAYING = 1.01
# vLLM may use more beside its share than is counted: this much outside torch, and this many times its CUDA graphs.
_UNSURE_BYTES = 3 * GIB // 2
_UNSURE_GRAPHS = 2
# What SGLang's guide recommends to leave beside weights, KV cache and graphs, including activations.
_SGLANG_LEFT_BYTES = 5 * GIB


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """One layout: `replicas` copies as in `budget`, with users spread over them."""

    budget: ServingBudget
    replicas: int
    decode_step_s: float
    loading: Loading
    demands: tuple[Demand, ...]

    @property
    def configuration(self) -> ServingConfiguration:
        """Configuration of one replica, for its share of the users."""
        return self.budget.configuration

    @property
    def shortages(self) -> tuple[Demand, ...]:
        """What there is too little of: memory of the GPU or of the host, or memory while loading."""
        return shortages(self.demands)

    @property
    def fits(self) -> bool:
        """Whether all users fit at once, and the engine can load the model and start."""
        return not self.shortages

    @property
    def missing_bytes(self) -> int:
        """Bytes that one GPU lacks, or its part of what the host lacks."""
        return round(max((float(demand.missing_bytes) for demand in self.shortages), default=0.0))

    @property
    def on_host(self) -> str:
        """What is not on the GPUs, like "40 of 81 layers on the host"; empty if all is."""
        budget, experts = self.budget, self.configuration.cpu_experts
        if not isinstance(budget, LlamaBudget):
            return ""
        away = budget.layers - budget.gpu_layers
        parts = [f"{away} of {budget.layers} layers"] * (away > 0) + [f"experts of {experts} layers"] * bool(experts)
        return f"{' and '.join(parts)} on the host" if parts else ""

    @property
    def most_users(self) -> int:
        """Users that fit at this context, over all replicas."""
        asked = self.configuration
        return self.replicas * self.budget.kv.most_users(asked.context, asked.shared_prefix)

    @property
    def longest_context(self) -> int:
        """Longest context for these users."""
        asked = self.configuration
        return self.budget.kv.longest_context(asked.users, asked.shared_prefix)

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of decoded tokens per second, over all replicas."""
        return self.replicas * self.configuration.users / self.decode_step_s


@dataclass(frozen=True, slots=True)
class FlagChange:
    """One flag that would make it fit or leave more room, and its effect."""

    flag: str
    words: str
    users: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The resulting plan. `users` is the total over all replicas."""

    shape: ModelShape
    model: str
    cluster: Cluster
    users: int
    best: ServingLayout
    others: tuple[ServingLayout, ...]
    changes: tuple[FlagChange, ...]
    neighbours: "tuple[Neighbour, ...]" = ()  # other processes on the cards

    @property
    def shortages(self) -> tuple[Demand, ...]:
        """What the best layout has too little of."""
        return self.best.shortages

    @property
    def fits(self) -> bool:
        """Whether the best layout fits: the verdict of reports, exit statuses and exports."""
        return self.best.fits

    @property
    def launch(self) -> "ServingLaunch":
        """The best layout in the form that exports use."""
        from tonnage.planner.export import ServingLaunch

        asked, budget = self.best.configuration, self.best.budget
        counts = tuple(len(stage.layers) for stage in stages(self.shape, asked.pp, asked.stage_layers))
        # vLLM should choose the block size for latent attention, whose fast kernels need larger blocks.
        attentions = [layer.attention for layer in self.shape.decoder.layers if layer.attention]
        latent = any(attention.kind is AttentionKind.LATENT for attention in attentions)
        launched = replace(
            asked,
            users=self.users,
            block=0 if latent and asked.block == BLOCK else asked.block,
            stage_layers=() if len(set(counts)) == 1 else counts,
            gpu_layers=budget.gpu_layers if isinstance(budget, LlamaBudget) else 0,
        )
        return ServingLaunch(
            **{field.name: getattr(launched, field.name) for field in fields(launched)},
            model=self.model,
            stored=self.shape.dtype,
            tokenizer=self.shape.name,
            copies=self.best.replicas,
            gpus_per_host=self.cluster.gpus_per_host,
            card=self.cluster.gpu.name,
            card_bytes=budget.capacity_bytes,
            cache_tokens=budget.kv.tokens,
            ledger=tuple((category.label, size) for category, size in budget.ledger.ranked()),
        )


class _Search(NamedTuple):
    """What is searched: a model on a cluster with these settings; `tp` and `pp` 0 are open."""

    shape: ModelShape
    cluster: Cluster
    asked: ServingConfiguration
    tp: int
    pp: int

    def best(self, **changes: Any) -> ServingLayout:
        """Return the best layout, after a change to what is searched."""
        return self._replace(**changes).ranked()[0]

    def ranked(self) -> list[ServingLayout]:
        """Return layouts, the fastest fitting one first; if none fits, by missing memory to a tenth of the card."""
        shape, cluster, asked, tp, pp = self
        step = cluster.gpu.memory_bytes // 10

        def rank(layout: ServingLayout) -> tuple[bool, int, float]:
            return not layout.fits, layout.missing_bytes // step, -layout.tokens_per_s

        if asked.engine == "llama.cpp":
            budget = _placed(shape, cluster, replace(asked, tp=tp or 1, pp=pp or 1))
            return [_layout(shape, budget, cluster, cluster.hosts)]
        ways = [(tp or 1, pp or 1)] if asked.engine == "tonnage" else splits(shape, cluster, asked, tp, pp)
        layouts = sorted((self.layout(asked, *each) for each in ways), key=rank)
        # Only vLLM can be given another split.
        if asked.engine != "vllm":
            return layouts
        # The layers of the closest are split anew if that leaves more room.
        for number, each in enumerate(layouts[: 1 if layouts[0].fits else _MOST_CUT]):
            if each.missing_bytes < step:
                found = cut(shape, each.configuration, cluster.gpu)
                layouts[number] = _layout(shape, found, cluster, each.replicas)
        return sorted(layouts, key=rank)

    def layout(self, asked: ServingConfiguration, tp: int, pp: int) -> ServingLayout:
        """Return one layout, with less than the engine's own share of the card if the card would not hold that."""
        shape, cluster, replicas = self.shape, self.cluster, self.cluster.gpus // (tp * pp)
        share = replace(asked, tp=tp, pp=pp, users=-(-asked.users // replicas))
        budget = serving_budget(shape, share, cluster.gpu)
        largest = budget.largest_utilization
        if budget.overflows and not asked.utilization and 0 < largest < budget.configuration.utilization:
            budget = serving_budget(shape, replace(share, utilization=largest), cluster.gpu)
        return _layout(shape, budget, cluster, replicas)


def _layout(shape: ModelShape, budget: ServingBudget, cluster: Cluster, replicas: int) -> ServingLayout:
    """Return the layout of a budget, with its speed and everything that must be large enough."""
    loading = serving_loading(shape, budget, cluster.gpus_per_host)
    on_gpu = Demand(part="GPU", needed_bytes=budget.needed_bytes, available_bytes=budget.available_bytes)
    demands = (on_gpu, *loading.demands(cluster, room_bytes=budget.room_bytes))
    if not isinstance(budget, LlamaBudget):
        return ServingLayout(budget, replicas, decode_step_s(shape, budget, cluster), loading, demands)
    if cluster.host_memory_bytes:
        host = Demand(
            part="host",
            needed_bytes=budget.host.total,
            available_bytes=budget.host_capacity_bytes,
            gpus=cluster.gpus_per_host,
        )
        demands = (host, *demands)
    return ServingLayout(budget, replicas, _llama_step_s(shape, budget, cluster), loading, demands)


def plan_serving(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, *, model: str = "", tp: int = 0, pp: int = 0
) -> ServingPlan:
    """Return the best layout, the others, and what to change if none fits. `tp` and `pp` 0 are searched."""
    search = _Search(shape, cluster, asked, tp, pp)
    best, *others = search.ranked()
    changes = tuple((_roomier if best.fits else _changes)(search, best))
    return ServingPlan(
        shape=shape, model=model or shape.name, cluster=cluster, users=asked.users, best=best, others=tuple(others),
        changes=changes,
    )  # fmt: skip


def best_layout(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, *, tp: int = 0, pp: int = 0
) -> ServingLayout | None:
    """Return only the best layout that holds all users; None if there is none."""
    weights = WEIGHT_FORMATS[resolved(shape, asked, cluster.gpu).weights]
    hosted = weights.experts_only or asked.engine == "llama.cpp"
    if not hosted and weights.matrix_bytes(shape.parameters) > cluster.gpus * cluster.gpu.memory_bytes:
        return None
    try:
        best = _Search(shape, cluster, asked, tp, pp).best()
    except (BadLayout, RequestError):
        return None
    return best if best.fits else None


def decode_step_s(shape: ModelShape, budget: ServingBudget, cluster: Cluster) -> float:
    """Return one decode step for every user at full context: weights read once per micro-batch, the cache once."""
    asked, kv = budget.configuration, budget.kv.layout
    batch = -(-asked.users // asked.pp)
    weights = budget.ledger[Category.PARAMETERS] * share_read(shape, batch) * asked.pp
    tokens = sum(min(asked.context, group.window or asked.context) for group in kv.groups)
    cache = asked.users * tokens * kv.bytes_per_block / kv.block
    return (weights + cache) / cluster.gpu.bandwidth_bytes_per_s + all_reduces_s(shape, asked, cluster, batch)


# llama.cpp: where it puts a model's layers, and its decoding speed. Each layer is read where it is, one after another.


def _placed(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration) -> LlamaBudget:
    """Return the budget on the GPUs of one host and its memory."""
    return llama_budget(shape, asked, cluster.gpu, gpus=cluster.gpus_per_host, host_bytes=cluster.host_memory_bytes)


def _llama_step_s(shape: ModelShape, budget: LlamaBudget, cluster: Cluster) -> float:
    """Return one decode step of all slots at full context: GPUs in turn, then the host at its memory's speed.

    Of a mixture, only the experts that at least one slot picks are read.
    """
    users, case = budget.configuration.users, budget.case
    experts = sum(layer.experts for layer in case.layers)
    mlps = [mlp for layer in shape.decoder.layers if (mlp := layer.feed_forward) and mlp.experts]
    idle = sum((1 - mlp.experts_per_token / mlp.experts) ** users for mlp in mlps) / len(mlps) if experts else 0.0
    cards = sum(card.weights + card.cache for card in budget.cards)
    on_cards = cards - idle * (experts - budget.host_expert_bytes)
    # Only one row of the embedding is read per token.
    host = budget.host.weights + budget.host.cache - case.recipe.embedding_bytes
    if budget.gpu_layers == 0 and shape.tied:
        host += case.recipe.output_bytes
    on_host = max(host - idle * budget.host_expert_bytes, 0)
    speed = cluster.host_memory_bytes_per_s or cluster.gpu.bandwidth_bytes_per_s
    return max(on_cards, 0) / cluster.gpu.bandwidth_bytes_per_s + on_host / speed


def share_read(shape: ModelShape, tokens: int) -> float:
    """Return the share of weights that `tokens` tokens touch: in a mixture, experts picked by at least one of them."""
    idle = 0.0
    for layer in shape.decoder.layers:
        if (mlp := layer.feed_forward) and mlp.experts:
            idle += (1 - mlp.experts_per_token / mlp.experts) ** tokens * mlp.experts * layer.expert_parameters
    return 1 - idle / shape.parameters


def all_reduces_s(shape: ModelShape, asked: ServingConfiguration, cluster: Cluster, batch: int) -> float:
    """Return the all-reduces of one step: two per layer."""
    if asked.tp == 1:
        return 0.0
    layers = len(shape.decoder.layers)
    sent = 2 * (asked.tp - 1) / asked.tp * batch * shape.hidden * asked.compute_bytes
    return 2 * layers * (_ALL_REDUCE_S + sent / cluster.link_bytes_per_s(asked.tp))


def _changes(search: _Search, best: ServingLayout) -> Iterator[FlagChange]:
    """Yield changes that would make it fit, the mildest first."""
    cluster, asked = search.cluster, search.asked
    if best.budget.overflows and best.budget.outside_bytes:
        share = best.budget.largest_utilization
        found = search.best(asked=replace(asked, utilization=share))
        yield from [_change(f"--utilization {share:g}", found)] if found.fits else []
    if all(demand.part == "host" for demand in best.shortages):
        needed_gib = math.ceil(max(demand.needed_bytes for demand in best.shortages) / GIB)
        found = search.best(cluster=cluster.with_host(memory_bytes=needed_gib * GIB))
        yield from [_change(f"--host-memory {needed_gib}g", found)] if found.fits else []
    newest = latest_version()
    if asked.engine == "vllm" and asked.engine_version not in ("", newest):
        found = search.best(asked=replace(asked, engine_version=newest))
        yield from [_change(f"--engine-version {newest}", found)] if found.fits else []
    layouts = ((flag, search.best(asked=trial)) for flag, trial in _trials(best, asked))
    worked = ((flag, found) for flag, found in layouts if found.fits)
    yield from (_change(flag, found, beside=best) for flag, found in islice(worked, _MOST_TRIALS))
    # More GPUs: fill a host before adding another.
    room = max(cluster.host.gpus, cluster.gpus_per_host) // cluster.gpus_per_host * cluster.gpus_per_host
    more, times = "", 2
    while times <= _MOST_TIMES_GPUS and not more:
        per_host = min(cluster.gpus_per_host * times, room)
        larger = replace(cluster, gpus_per_host=per_host, hosts=cluster.gpus * times // per_host)
        found = search.best(cluster=larger)
        if found.fits:
            more = f"--gpus {larger.gpus}x{larger.gpu.key}"
            yield _change(more, found)
        times *= 2
    # The smallest common GPU on which it fits.
    for other in common_clusters(cluster.gpu.maker):
        same_host = other.as_stated(cluster.stated)
        if layout := best_layout(search.shape, same_host, asked, tp=search.tp, pp=search.pp):
            change = _change(f"--gpus {other.name}", layout)
            if change.flag != more:
                yield replace(change, words=f"would do: {change.words}")
            break
    if not best.budget.overflows:
        # A shorter context or fewer users, if any fit at all.
        users, context, block = asked.users, best.configuration.context, best.configuration.block
        shorter, most = best.longest_context // block * block, best.most_users
        if shorter and search.best(asked=replace(asked, context=shorter)).fits:
            yield FlagChange(f"--context {shorter}", _fitting(users, shorter), users, shorter)
        if most and search.best(asked=replace(asked, users=most)).fits:
            yield FlagChange(f"--users {most}", _fitting(most, context), most, context)


def _trials(best: ServingLayout, asked: ServingConfiguration) -> Iterator[tuple[str, ServingConfiguration]]:
    """Yield flags that change no output, then those that cost increasing accuracy."""
    known, llama = best.configuration, asked.engine == "llama.cpp"
    fewer = 1 << (max(known.users, best.most_users // best.replicas) - 1).bit_length()
    if not asked.max_seqs and fewer < known.max_seqs:
        yield f"--max-seqs {fewer}", replace(asked, max_seqs=fewer)
    if llama and asked.gpu_layers >= 0:
        yield "no --gpu-layers", replace(asked, gpu_layers=-1)
    cache = "" if known.kv in ("fp8", "int4", *GGML_CACHES) else "q8_0" if llama else "fp8"
    if cache:
        yield f"--kv {cache}", replace(asked, kv=cache)
    # Formats that save at least a quarter of the bits.
    formats = ("q8_0", "q4_k_m", "iq3_xxs") if llama else ("bf16", "fp8", "int4")
    served = [name for name in formats if asked.engine != "tonnage" or name in OWN_WEIGHTS]
    smaller = [name for name in served if WEIGHT_FORMATS[name].bits < 0.75 * WEIGHT_FORMATS[known.weights].bits]
    yield from ((f"--weights {name}", replace(asked, weights=name)) for name in smaller)
    yield from ((f"--weights {name} --kv {cache}", replace(asked, weights=name, kv=cache)) for name in smaller if cache)


def _roomier(search: _Search, best: ServingLayout) -> Iterator[FlagChange]:
    """Yield changes that leave more room in a layout that fits."""
    asked, known = search.asked, best.configuration
    if asked.engine == "llama.cpp":
        yield from _faster(search, best)
        return
    trials = list(_trials(best, asked))[:_MOST_TRIALS]
    # The utilization, in hundredths, that leaves room even if counts outside it are off by as much as observed. vLLM's
    # is a share of the card, SGLang's of the memory free before loading.
    budget = best.budget
    whole: float = budget.capacity_bytes
    unsure = _UNSURE_BYTES + _UNSURE_GRAPHS * sum(int(term.size_bytes) for term in budget.terms if term.name == GRAPHS)
    if known.engine == "sglang":
        unsure = max(unsure, _SGLANG_LEFT_BYTES - budget.ledger[Category.ACTIVATIONS])
        whole = budget.limit_bytes / known.utilization
    share = max(int((budget.room_bytes - budget.outside_bytes - unsure) * 100 / whole) if whole else 0, 0) / 100
    if known.engine in ("vllm", "sglang") and not asked.utilization and share > known.utilization:
        trials.append((f"--utilization {share:g}", replace(asked, utilization=share)))
    for flag, trial in trials:
        layout = search.layout(replace(trial, stage_layers=known.stage_layers), known.tp, known.pp)
        tokens, gain = layout.budget.kv.tokens, layout.budget.kv.tokens / max(best.budget.kv.tokens, 1)
        if gain > _WORTH_SAYING:
            change = _change(flag, layout)
            yield replace(change, words=f"{tokens:,} tokens ({100 * (gain - 1):+.0f} %), {change.words}")


def _faster(search: _Search, best: ServingLayout) -> Iterator[FlagChange]:
    """Yield changes with which llama.cpp would decode faster, if layers are on the host."""
    shape, asked, layers = search.shape, search.asked, len(search.shape.decoder.layers)
    if not best.on_host:
        return
    trials = list(_trials(best, asked))

    def rest_fits(experts: int) -> bool:
        """Say whether all else fits on the GPUs if so many layers have their experts on the host."""
        found = _placed(shape, search.cluster, replace(asked, gpu_layers=layers + 1, cpu_experts=experts))
        return found.fits and found.total_bytes <= found.room_bytes - MARGIN_BYTES

    if any(layer.feed_forward and layer.feed_forward.experts for layer in shape.decoder.layers):
        fewest = bisect_left(range(layers + 1), True, lo=1, key=rest_fits)
        if fewest <= layers and fewest != asked.cpu_experts:
            trials.insert(0, (f"--cpu-moe {fewest}", replace(asked, gpu_layers=-1, cpu_experts=fewest)))
    found = ((flag, search.best(asked=trial, tp=0, pp=0)) for flag, trial in trials)
    enough = _WORTH_SAYING * best.tokens_per_s
    faster = ((flag, each) for flag, each in found if each.fits and each.tokens_per_s > enough)
    for flag, each in islice(faster, _MOST_TRIALS):
        where = each.on_host or "all of it on the GPU"
        yield replace(_change(flag, each), words=f"{where}, {each.tokens_per_s:,.1f} tokens/s at most")


def _change(flag: str, found: ServingLayout, beside: ServingLayout | None = None) -> FlagChange:
    """Return the effect of a flag, naming the layout if it differs from `beside`."""
    most = min(found.most_users, found.replicas * found.configuration.max_seqs)
    words = _fitting(most, found.configuration.context)
    if beside is not None and found.replicas != beside.replicas:
        words += f", {found.replicas} copies of {found.configuration.gpus} GPUs"
    return FlagChange(flag, words, most, found.longest_context)


def _fitting(users: int, context: int) -> str:
    return f"{users:,} user{'s' * (users != 1)} at {context:,} tokens"

"""Lay a model out on the GPUs at hand for serving: what is given stays, what is left open is searched.

Searched are tensor and pipeline parallelism, and how many copies of the model share the users. Of the layouts that hold all
users the one with the highest ceiling of decoded tokens a second wins: weights and cache read once a step at the memory's
speed, and two all-reduces a layer. The ceiling ranks layouts; it is no promise. Where nothing fits, changes are tried one at
a time, and those that help are offered with what they give; where it fits, those that leave more room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.budget.own_engine import OWN_WEIGHTS
from tonnage.budget.serving import ServingBudget, ServingConfiguration, divides, serving_budget
from tonnage.errors import BadLayout
from tonnage.hardware import Cluster
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.planner.export import ServingLaunch

# A small all-reduce over NVLink takes about this long, whatever its size.
_ALL_REDUCE_S = 10e-6
_MOST_TIMES_GPUS = 64
# Changes of formats to offer, and how much more a pool must hold to be worth a line.
_MOST_TRIALS = 2
_WORTH_SAYING = 1.01


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay the model out: `replicas` copies, each as `budget` says; users are spread over them."""

    budget: ServingBudget
    replicas: int
    decode_step_s: float

    @property
    def configuration(self) -> ServingConfiguration:
        """Of one copy, for its share of the users."""
        return self.budget.configuration

    @property
    def fits(self) -> bool:
        """Whether every user finds room at once."""
        return self.budget.fits

    @property
    def missing_bytes(self) -> int:
        """What one GPU lacks."""
        return max(self.budget.needed_bytes - self.budget.available_bytes, 0)

    @property
    def most_users(self) -> int:
        """At this context, over all copies."""
        asked = self.configuration
        return self.replicas * self.budget.kv.most_users(asked.context, asked.shared_prefix)

    @property
    def longest_context(self) -> int:
        """For these users."""
        asked = self.configuration
        return self.budget.kv.longest_context(asked.users, asked.shared_prefix)

    @property
    def tokens_per_s(self) -> float:
        """The ceiling of decoding, over all copies."""
        return self.replicas * self.configuration.users / self.decode_step_s


@dataclass(frozen=True, slots=True)
class Change:
    """One flag that would make it fit, or leave more room where it does, and what it gives."""

    flag: str
    words: str
    users: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The answer. `users` is what was asked of all copies together."""

    shape: ModelShape
    model: str
    cluster: Cluster
    users: int
    best: Layout
    others: tuple[Layout, ...]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Whether the best layout does."""
        return self.best.fits

    @property
    def launch(self) -> "ServingLaunch":
        """The best layout, as files and flags are made from it."""
        from tonnage.planner.export import ServingLaunch

        asked = self.best.configuration
        names = (
            "gpus",
            "tp",
            "pp",
            "context",
            "max_seqs",
            "batched_tokens",
            "weights",
            "kv",
            "block",
            "utilization",
            "eager",
        )
        return ServingLaunch(model=self.model, **{name: getattr(asked, name) for name in names})


def plan_serving(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, *, model: str = "", tp: int = 0, pp: int = 0
) -> ServingPlan:
    """The best layout, the others, and what to change where none fits. `tp` and `pp` 0 are searched."""
    ranked = _ranked(shape, cluster, asked, tp, pp)
    changes = (_roomier if ranked[0].fits else _changes)(shape, cluster, asked, tp, pp, ranked[0])
    return ServingPlan(
        shape=shape,
        model=model or shape.name,
        cluster=cluster,
        users=asked.users,
        best=ranked[0],
        others=tuple(ranked[1:]),
        changes=tuple(changes),
    )


def _ranked(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int) -> list[Layout]:
    """Fastest that fits first; where none fits, the one that lacks least, to a tenth of the card."""
    step = cluster.gpu.memory_bytes // 10
    layouts = [_layout(shape, cluster, asked, *each) for each in _splits(shape, cluster, asked, tp, pp)]
    return sorted(layouts, key=lambda each: (not each.fits, each.missing_bytes // step, -each.tokens_per_s))


def _splits(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int
) -> Iterator[tuple[int, int]]:
    gpus = cluster.gpus
    given = (tp or 1) * (pp or 1)
    if gpus % given:
        raise BadLayout(
            f"--tp {tp or 1} × --pp {pp or 1} = {given} GPUs do not divide {gpus}.",
            hint=f"Use a product that divides {gpus}: {', '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}.",
        )
    if asked.engine == "tonnage":
        yield tp or 1, pp or 1
        return
    layers = len(shape.decoder.layers)
    for each_tp in [tp] if tp else _divisors(cluster.gpus_per_host):
        for each_pp in [pp] if pp else _divisors(gpus):
            searched = tp or divides(shape, each_tp)
            if gpus % (each_tp * each_pp) == 0 and searched and (pp or each_pp <= layers):
                yield each_tp, each_pp


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _layout(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int) -> Layout:
    replicas = cluster.gpus // (tp * pp)
    share = replace(asked, tp=tp, pp=pp, users=-(-asked.users // replicas))
    budget = serving_budget(shape, share, cluster.gpu)
    return Layout(budget, replicas, decode_step_s(shape, budget, cluster))


def decode_step_s(shape: ModelShape, budget: ServingBudget, cluster: Cluster) -> float:
    """One token for every user, at the full context: weights once for each micro-batch, the cache once."""
    asked, kv = budget.configuration, budget.kv.layout
    batch = -(-asked.users // asked.pp)
    weights = budget.ledger[Category.PARAMETERS] * _share_read(shape, batch) * asked.pp
    tokens = sum(min(asked.context, group.window or asked.context) for group in kv.groups)
    cache = asked.users * tokens * kv.bytes_per_block / kv.block
    return (weights + cache) / cluster.gpu.bandwidth_bytes_per_s + _all_reduces_s(shape, asked, cluster, batch)


def _share_read(shape: ModelShape, tokens: int) -> float:
    """The share of the weights that so many tokens touch: of a mixture, the experts that at least one of them picks."""
    idle = 0.0
    for layer in shape.decoder.layers:
        mlp = layer.feed_forward
        if mlp and mlp.experts:
            untouched = (1 - mlp.experts_per_token / mlp.experts) ** tokens
            idle += untouched * mlp.experts * layer.expert_parameters
    return 1 - idle / shape.parameters


def _all_reduces_s(shape: ModelShape, asked: ServingConfiguration, cluster: Cluster, batch: int) -> float:
    if asked.tp == 1:
        return 0.0
    layers = len(shape.decoder.layers)
    sent = 2 * (asked.tp - 1) / asked.tp * batch * shape.hidden * asked.compute_bytes
    return 2 * layers * (_ALL_REDUCE_S + sent / cluster.link_bytes_per_s(asked.tp))


def _changes(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int, best: Layout
) -> Iterator[Change]:
    """What would make it fit, the mildest first."""
    if best.budget.overflows and best.budget.outside_bytes:
        share = best.budget.largest_utilization
        found = _ranked(shape, cluster, replace(asked, utilization=share), tp, pp)[0]
        yield from [_change(f"--utilization {share:g}", found)] if found.fits else []
    worked = 0
    for flag, trial in _trials(best.configuration, asked):
        found = _ranked(shape, cluster, trial, tp, pp)[0]
        if found.fits and worked < _MOST_TRIALS:
            worked += 1
            yield _change(flag, found)
    yield from _more_gpus(shape, cluster, asked, tp, pp)
    if not best.budget.overflows:
        yield from _less(best, asked.users)


def _trials(known: ServingConfiguration, asked: ServingConfiguration) -> Iterator[tuple[str, ServingConfiguration]]:
    """Flags that change no answer, then those that cost a little accuracy, then more."""
    fewer = 1 << max(known.users - 1, 0).bit_length()
    if not asked.max_seqs and fewer < known.max_seqs:
        yield f"--max-seqs {fewer}", replace(asked, max_seqs=fewer)
    cache = [] if known.kv in ("fp8", "int4") else ["fp8"]
    for kv in cache:
        yield f"--kv {kv}", replace(asked, kv=kv)
    smaller = [name for name in _smaller(known.weights) if asked.engine == "vllm" or name in OWN_WEIGHTS]
    for weights in smaller:
        yield f"--weights {weights}", replace(asked, weights=weights)
    for weights in smaller:
        for kv in cache:
            yield f"--weights {weights} --kv {kv}", replace(asked, weights=weights, kv=kv)


def _roomier(
    shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int, best: Layout
) -> Iterator[Change]:
    """It fits: what would leave room for more."""
    for flag, trial in list(_trials(best.configuration, asked))[:_MOST_TRIALS]:
        known = best.configuration
        found = _layout(shape, cluster, trial, known.tp, known.pp)
        gain = found.budget.kv.tokens / max(best.budget.kv.tokens, 1)
        if gain > _WORTH_SAYING:
            change = _change(flag, found)
            yield replace(change, words=f"{found.budget.kv.tokens:,} tokens ({gain - 1:+.0%}), {change.words}")


def _smaller(weights: str) -> list[str]:
    return {"fp32": ["bf16", "fp8", "int4"], "fp8": ["int4"], "int8": ["int4"], "int4": [], "mxfp4": []}.get(
        weights, ["fp8", "int4"]
    )


def _change(flag: str, found: Layout) -> Change:
    most = min(found.most_users, found.replicas * found.configuration.max_seqs)
    longest = found.longest_context
    words = f"{most:,} users at {found.configuration.context:,} tokens"
    return Change(flag, words, most, longest)


def _more_gpus(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int) -> Iterator[Change]:
    times = 2
    while times <= _MOST_TIMES_GPUS:
        larger = _grown(cluster, times)
        found = _ranked(shape, larger, asked, tp, pp)[0]
        if found.fits:
            yield _change(f"--gpus {larger.gpus}x{larger.gpu.key}", found)
            return
        times *= 2


def _grown(cluster: Cluster, times: int) -> Cluster:
    """So many times the cards: hosts are filled before more are taken."""
    room = max(cluster.host.gpus, cluster.gpus_per_host)
    per_host = min(cluster.gpus_per_host * times, room // cluster.gpus_per_host * cluster.gpus_per_host)
    return replace(cluster, gpus_per_host=per_host, hosts=cluster.gpus * times // per_host)


def _less(best: Layout, users: int) -> Iterator[Change]:
    """A shorter context or fewer users, where any fit at all."""
    asked = best.configuration
    if best.longest_context >= asked.block:
        context = best.longest_context // asked.block * asked.block
        yield Change(f"--context {context}", f"{users:,} users at {context:,} tokens", users, context)
    if best.most_users:
        most = best.most_users
        yield Change(f"--users {most}", f"{most:,} users at {asked.context:,} tokens", most, asked.context)

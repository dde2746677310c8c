"""Find the fastest step of reinforcement learning that fits: placement of engine and trainer, sleep and offload.

Given settings are kept. Open ones are searched: the engine on the trainer's GPUs or its own, its sleep level, memory
share and tensor parallelism, what is offloaded between phases, and the trainer's layout (`planner.training.search`, on a card
reduced by what waits beside it). Times come from the training clock, a rollout in which every completion has the full
length, and the links that weights and states cross.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any

from tonnage.budget.demands import Demand, shortages
from tonnage.budget.loading import training_loading
from tonnage.budget.rl import MOVABLE, Algorithm, Cast, Held, Movable, Phase, Reference, phases, valued
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, divides, serving_budget
from tonnage.budget.time.roofline import calibration
from tonnage.budget.time.step import StepClock
from tonnage.errors import BadLayout, RequestError, TonnageError
from tonnage.hardware import Cluster
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.planner import divisors
from tonnage.planner.rl.rollout import Rollout, rollout
from tonnage.planner.training.demands import step_demands
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest
from tonnage.planner.training.search import HEADROOM, PlanSearch, TrainingPlan, search

# vLLM's share of the card is at most its default.
_LARGEST_SHARE = 0.9
# Shares of all samples at once for which a cache that is never freed is sized.
_POOLS = (1.0, 0.25)
# Shares of the GPUs tried for rollouts.
_APART = (0.125, 0.25, 0.5, 0.75)
_ALTERNATIVES = 4
_MOST_REMEDIES = 5
# Given flags that are left to the search if nothing fits with them.
_RELEASED = ("utilization", "engine_tp", "rollout_gpus", "offload")
_RELEASED_OF_TRAINING = ("checkpoint", "loss", "zero", "framework", "micro_batch")
# What is offloaded, by the words of `--offload`.
OFFLOAD_NAMES: dict[Movable, str] = {"frozen": "reference", "optimizer": "optimizer", "weights": "weights"}
# Relative difference within the clock's error.
_AS_QUICK = 0.03
# Tokens per vLLM step, as TRL starts it.
_BATCHED_TOKENS = 4096
_MOST_SEQS = 1024
# No trainer is searched for with less card memory left.
_LEAST_BYTES = 2**30
_GIB = 2**30
_MOST_TRIES = 3
_LONGEST = 1 << 24
_LARGEST = {"group": 1 << 16, "prompts": 1 << 20, "prompt": 1 << 24, "completion": 1 << 24, "iterations": 1 << 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRequest:
    """A request; fields that are None are searched. `rollout_gpus` 0: the engine shares the trainer's GPUs."""

    training: TrainingRequest  # its `seq` and `global_batch` are derived
    algorithm: Algorithm = "grpo"
    prompts: int = 32
    group: int = 8
    prompt: int = 512
    completion: int = 2048
    iterations: int = 1
    reference: Reference = "none"
    reward: ModelShape | None = None
    critic: ModelShape | None = None
    engine: str = "vllm"
    engine_tp: int | None = None
    utilization: float | None = None
    rollout_gpus: int | None = None
    sleep: int | None = None
    offload: frozenset[Movable] | None = None
    share_weights: bool = False
    own_process: bool = False
    overlap: bool = False
    eager: bool = False

    @property
    def samples(self) -> int:
        """Completions per step."""
        return self.prompts * self.group

    @property
    def seq(self) -> int:
        """Tokens per sample."""
        return self.prompt + self.completion

    @property
    def old_log_probs(self) -> bool:
        """Whether the actor scores its samples before it is trained on them.

        Another engine's log-probabilities differ from the trainer's, and after the first pass over the samples so do
        the weights.
        """
        return not self.share_weights or self.iterations > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlan:
    """One way to run a step. `rollout` is None if not even one sequence fits."""

    request: RlRequest
    cluster: Cluster
    cast: Cast
    trainer: TrainingPlan
    engine: ServingBudget
    rollout: Rollout | None
    phases: tuple[Phase, ...]
    rollout_gpus: int
    host_bytes: int
    demands: tuple[Demand, ...]

    @property
    def step_s(self) -> float:
        """Seconds of all phases in sequence; with separate GPUs and `overlap`, rollouts run concurrently."""
        seconds = {phase.name: phase.seconds for phase in self.phases}
        if self.request.overlap and self.rollout_gpus:
            made, sent = seconds.pop("rollout", 0.0), seconds.pop("sync", 0.0)
            return max(made, sum(seconds.values())) + sent
        return sum(seconds.values())

    @property
    def peak(self) -> Phase:
        """The phase with the most memory."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def utilization(self) -> float:
        """The engine's share of its card."""
        return self.engine.configuration.utilization

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all GPUs."""
        return self.request.samples / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, generated and trained on."""
        return self.samples_per_s * self.request.completion

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fullest phase exceeds the card by."""
        return max(self.peak.total_bytes - self.cluster.gpu.memory_bytes, 0)

    @property
    def shortages(self) -> tuple[Demand, ...]:
        """What there is too little of: memory of a GPU or of the host, the KV cache, or memory while loading."""
        return shortages(self.demands)

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything: the verdict of reports and exit statuses."""
        return not self.shortages

    @property
    def unhindered(self) -> bool:
        """Whether more memory would not help: nothing is recomputed, and all samples run at once."""
        made, recomputes = self.rollout, self.trainer.configuration.checkpoint != "none"
        return self.fits and made is not None and made.waves == 1 and not recomputes

    @property
    def kind(self) -> tuple[object, ...]:
        """Key by which two plans look different to a reader."""
        return self.rollout_gpus, bool(self.cast.sleep), self.cast.offload


@dataclass(frozen=True, slots=True, kw_only=True)
class RlFindings:
    """The best plan, or the one closest to fitting; alternatives; and remedies that make it fit."""

    shape: ModelShape
    cluster: Cluster
    request: RlRequest
    best: RlPlan
    alternatives: tuple[RlPlan, ...]
    remedies: tuple[tuple[str, "RlPlan"], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.best.fits


def plan_rl(shape: ModelShape, cluster: Cluster, request: RlRequest) -> RlFindings:
    """Search every option that the request leaves open."""
    check(request, shape, cluster)
    best, *ranked = _ranked(shape, cluster, request)
    others = {best.kind: best}
    for plan in ranked:
        # Skip plans that move more data than the best without gaining from it.
        alike = plan.rollout_gpus == best.rollout_gpus and bool(plan.cast.sleep) == bool(best.cast.sleep)
        gains = plan.step_s < best.step_s or plan.peak.total_bytes < (1 - _AS_QUICK) * best.peak.total_bytes
        if plan.fits and not (alike and plan.cast.offload > best.cast.offload and not gains):
            others.setdefault(plan.kind, plan)
    alternatives = tuple(others.values())[1 : _ALTERNATIVES + 1]
    remedies = () if best.fits else tuple(islice(_remedies(shape, cluster, request, best), _MOST_REMEDIES))
    return RlFindings(
        shape=shape, cluster=cluster, request=request, best=best, alternatives=alternatives, remedies=remedies
    )


def _ranked(shape: ModelShape, cluster: Cluster, request: RlRequest) -> list[RlPlan]:
    """Return the plans, the fastest fitting one first, then by missing memory."""
    bench = _Bench(shape, cluster, request)
    found = list(bench.plans())
    if not found:
        raise bench.problem or BadLayout(
            "No way to share these GPUs satisfies all of these flags together.",
            hint="Leave one of --rollout-gpus, --engine-tp, --sleep, --offload out.",
        )
    quickest = min((plan.step_s for plan in found if plan.fits), default=0.0)

    def rank(plan: RlPlan) -> tuple[object, ...]:
        # Among plans of about the same speed, prefer the one that moves least.
        as_quick = plan.fits and plan.step_s <= (1 + _AS_QUICK) * quickest
        moves = (len(plan.cast.offload), plan.engine.configuration.tp) if as_quick else (0, 0)
        missing = sum(float(demand.missing_bytes) for demand in plan.shortages)
        return not plan.fits, missing // _GIB, not as_quick, *moves, plan.step_s

    return sorted(found, key=rank)


def check(request: RlRequest, shape: ModelShape, cluster: Cluster) -> None:
    """Raise RequestError for an impossible request."""
    for name, most in _LARGEST.items():
        number = getattr(request, name)
        if not 1 <= number <= most:
            raise BadLayout(f"--{name} {number} makes no sense.", hint=f"Give --{name} between 1 and {most:,}.")
    if not shape.decoder.causal or not shape.logits or not shape.vocab:
        raise RequestError(f"{shape.name} writes no tokens, so there is nothing to reinforce.")
    most = shape.max_positions if shape.learned_positions else _LONGEST
    if request.seq > most:
        both = f"--prompt {request.prompt} and --completion {request.completion}"
        problem = f"{both} are {request.seq:,} tokens together."
        raise BadLayout(problem, hint=f"{shape.name} takes {most:,} at most.")
    for problem, hint in _misfits(request, cluster):
        raise BadLayout(problem, hint=hint)
    tp, cards = request.engine_tp, request.rollout_gpus or cluster.gpus
    if tp is not None and (tp < 1 or cards % tp or not divides(shape, tp)):
        good = [str(number) for number in divisors(cards) if number <= 8 and divides(shape, number)]
        problem = f"--engine-tp {tp} does not divide {cards} GPUs and the heads of {shape.name}."
        raise BadLayout(problem, hint=f"Choose {', '.join(good)}.")


def _misfits(request: RlRequest, cluster: Cluster) -> Iterator[tuple[str, str]]:
    training, apart = request.training, request.rollout_gpus
    if request.group == 1 and request.algorithm in ("grpo", "rloo", "dapo"):
        yield f"--group 1: {request.algorithm} compares the completions of a prompt.", "Give --group 2 at least."
    if request.critic and request.algorithm != "ppo":
        yield f"--critic: {request.algorithm} has none.", "Add --algorithm ppo, or leave it out."
    if request.reference == "adapters-off" and not training.lora_rank:
        yield "--reference adapters-off: no adapters are trained.", "Add --lora 16, or use --reference copy."
    if request.utilization is not None and not 0 < request.utilization <= 1:
        yield f"--utilization {request.utilization:g} is no share of a card.", "Write it like 0.4."
    if request.share_weights and request.engine != "tonnage":
        yield "--share-weights: vLLM keeps weights of its own.", "Add --engine tonnage."
    if request.share_weights and not training.lora_rank and training.precision != "bf16":
        hint = "Add --precision bf16, or --lora 16."
        yield "--share-weights: the engine serves 16 bits, and the trained weights are FP32.", hint
    if request.share_weights and training.base != "16-bit":
        yield f"--share-weights: the engine serves no {training.base} base.", "Leave one of the two out."
    if request.share_weights and (apart or request.own_process):
        yield "--share-weights needs the engine in the trainer's process.", "Leave one of the two out."
    if request.engine == "tonnage" and (request.engine_tp or 1) > 1:
        yield "Tonnage's own engine serves from one GPU.", "Use --engine vllm, or leave --engine-tp out."
    if request.engine == "tonnage" and request.sleep == 2:
        yield "Tonnage's own engine keeps its weights asleep.", "Write --sleep 1."
    if request.engine == "tonnage" and training.base != "16-bit":
        yield "Tonnage's own engine serves no 4-bit weights.", "Use --engine vllm."
    if apart is not None and not 0 <= apart < cluster.gpus:
        yield f"--rollout-gpus {apart}: there are {cluster.gpus} GPUs, and one must train.", "Give fewer, or 0."
    if apart and _without(cluster, apart) is None:
        hint = f"Give whole hosts of {cluster.gpus_per_host}."
        yield f"--rollout-gpus {apart} leaves hosts of different sizes.", hint
    if request.overlap and (apart == 0 or cluster.gpus == 1):
        hint = "Give --rollout-gpus, or leave it out."
        yield "--overlap makes rollouts beside the training, on GPUs of their own.", hint
    if apart and request.sleep:
        yield "--sleep: an engine on GPUs of its own has nobody to make room for.", "Leave one of the two out."


def _without(cluster: Cluster, gpus: int) -> Cluster | None:
    """Return the hosts left after taking away `gpus` GPUs; None if they would differ in size."""
    if gpus % cluster.gpus_per_host == 0 and gpus < cluster.gpus:
        return replace(cluster, hosts=cluster.hosts - gpus // cluster.gpus_per_host)
    if cluster.hosts == 1:
        return replace(cluster, gpus_per_host=cluster.gpus_per_host - gpus)
    return None


class _Bench:
    """One request, with a cache of the trainers that its plans share."""

    def __init__(self, shape: ModelShape, cluster: Cluster, request: RlRequest) -> None:
        self.shape, self.cluster, self.request = shape, cluster, request
        training, share = request.training, request.completion / request.seq
        crowded = request.critic is not None or request.reward is not None or request.reference == "copy"
        # Beside other models everything is sharded, as in verl and OpenRLHF, so what waits does not depend on the
        # trainer.
        several = cluster.gpus - (request.rollout_gpus or 0) > 1
        zero = 3 if training.zero is None and crowded and several else training.zero
        self._training = replace(
            training, seq=request.seq, global_batch=request.samples, logit_share=share, offload=NO_OFFLOAD, zero=zero
        )
        self._trainers: dict[tuple[int, int], PlanSearch | None] = {}
        self._clocks: dict[tuple[int, int], StepClock] = {}
        self.problem: TonnageError | None = None

    def plans(self) -> Iterator[RlPlan]:
        """Yield a plan for every open option with a trainer."""
        request, gpus = self.request, self.cluster.gpus
        # How many GPUs the engine has of its own; 0: it shares the trainer's.
        shares = sorted({round(share * gpus) for share in _APART} - {0, gpus})
        placements = [number for number in shares if _without(self.cluster, number) is not None]
        placements = placements if request.overlap else [0, *placements]
        if request.share_weights or request.own_process or request.sleep:
            placements = [0]
        sleeps = [1 if request.engine == "tonnage" else 2, 0] if request.sleep is None else [request.sleep]
        frozen = request.reference == "copy" or request.reward is not None
        for apart in placements if request.rollout_gpus is None else [request.rollout_gpus]:
            cluster = _without(self.cluster, apart) if apart else self.cluster
            assert cluster is not None
            degrees = self._degrees(apart)
            for sleep in [0] if apart else sleeps:
                # Offload nothing, then what is cheapest to move, then more. Offloading the actor's own states makes room
                # for the engine, not for its training: only that of others does.
                helps = (sleep or request.critic is not None) and not request.share_weights
                useful = [name for name in MOVABLE if (frozen if name == "frozen" else helps)]
                movable = useful if self.cluster.host_memory_bytes else []
                offloads = [frozenset(movable[:count]) for count in range(len(movable) + 1)]
                for offload in offloads if request.offload is None else [request.offload]:
                    ways = [(tp, pool) for tp in degrees for pool in ([1.0] if sleep or apart else _POOLS)]
                    found = [self._plan(cluster, apart, sleep, offload, *way) for way in ways]
                    yield from (plan for plan in found if plan is not None)
                    if any(plan is not None and plan.unhindered for plan in found):
                        break

    def _degrees(self, apart: int) -> list[int]:
        """Return the engine's tensor parallelism: as asked, or the fastest that divides GPUs and heads."""
        request, cards = self.request, apart or self.cluster.gpus
        if request.engine == "tonnage":
            return [1]
        if request.engine_tp is not None:
            return [request.engine_tp] if cards % request.engine_tp == 0 else []
        most = min(cards, self.cluster.gpus_per_host, 8)
        tried = [tp for tp in divisors(cards) if tp <= most and divides(self.shape, tp)]
        engines = [(tp, self._engine(tp, apart, self._share_wanted(tp, apart, 1.0))) for tp in tried]
        shape, cluster = self.shape, self.cluster
        rollouts = [(tp, rollout(shape, cluster, engine, request, apart)) for tp, engine in engines if engine]
        seconds = {tp: made.seconds for tp, made in rollouts if made is not None}
        # The smallest degree of about the best speed, and the largest, which needs the least memory per GPU.
        quick = [tp for tp in seconds if seconds[tp] <= (1 + _AS_QUICK) * min(seconds.values())]
        return sorted({quick[0], max(seconds)}) if quick else tried[-1:]

    def _plan(
        self, cluster: Cluster, apart: int, sleep: int, offload: frozenset[Movable], tp: int, pool: float
    ) -> RlPlan | None:
        """Find a trainer beside all that waits on its card, then the largest engine that fits."""
        engine = self._engine(tp, apart, share=self._share_wanted(tp, apart, pool))
        found = self._beside(cluster, engine, apart, sleep, offload) if engine else None
        if engine is None or found is None:
            return None
        trainer, cast = found
        if not apart and self.request.utilization is None:
            # The engine gets what all phases leave of the card, at most what it wants.
            card = self.cluster.gpu.memory_bytes
            over = max(phase.total_bytes for phase in phases(cast, engine)) - (1 - HEADROOM) * card
            share = (engine.configuration.utilization * card - over) * 100 // card / 100
            if over > 0 and share > 0:
                engine = self._engine(tp, 0, share) or engine
        made = rollout(self.shape, self.cluster, engine, self.request, apart)
        shown = tuple(phases(cast, engine))
        timed = tuple(replace(phase, seconds=self._time_s(phase, cluster, cast, engine, made)) for phase in shown)
        # The most bytes on the host: everything offloaded, and an engine's weights at sleep level 1.
        every = {(one.owner, one.term.name): one for phase in shown for one in phase.held if phase.on != "rollout"}
        host_bytes = sum(one.size_bytes for one in every.values() if away(one) in cast.offload)
        if cast.sleep == 1 and engine.configuration.engine == "vllm":
            host_bytes += engine.ledger[Category.PARAMETERS]
        peak_bytes = max(phase.total_bytes for phase in timed)
        demands = self._demands(cluster, trainer, engine, made, peak_bytes=peak_bytes, host_bytes=host_bytes)
        return RlPlan(
            request=self.request, cluster=self.cluster, cast=cast, trainer=trainer, engine=engine, rollout=made,
            phases=timed, rollout_gpus=apart, host_bytes=host_bytes, demands=demands,
        )  # fmt: skip

    def _demands(
        self, cluster: Cluster, trainer: TrainingPlan, engine: ServingBudget, made: Rollout | None, *,
        peak_bytes: int, host_bytes: int,
    ) -> tuple[Demand, ...]:  # fmt: skip
        """Return what the fullest phase, what is on the host, one sequence, and loading the trained models need."""
        demands = [*step_demands(peak_bytes, host_bytes, 0, self.cluster)]
        if made is None:
            # The engine is sized for one sequence: it needs more than it has.
            demands.append(
                Demand(part="KV cache", needed_bytes=engine.needed_bytes, available_bytes=engine.available_bytes)
            )
        for shape in filter(None, (self.shape, self.request.critic)):
            demands += training_loading(shape, trainer.configuration, cluster).demands(cluster)
        return tuple(dict.fromkeys(demands))

    def _beside(
        self, cluster: Cluster, engine: ServingBudget, apart: int, sleep: int, offload: frozenset[Movable]
    ) -> tuple[TrainingPlan, Cast] | None:
        """Find a trainer on a card reduced by everything else on it, which in turn depends on how the trainer shards."""
        request, card = self.request, self.cluster.gpu.memory_bytes
        left, found = card, None
        for _ in range(_MOST_TRIES):
            trainer = self._trainer(cluster, left)
            if trainer is None:
                return found
            cast = Cast(
                shape=self.shape, gpu=self.cluster.gpu, training=trainer.configuration, reference=request.reference,
                reward=request.reward, critic=request.critic, old_log_probs=request.old_log_probs, sleep=sleep,
                share_weights=request.share_weights, own_process=request.own_process, apart=bool(apart), offload=offload,
            )  # fmt: skip
            found = trainer, cast
            needed = max(phase.total_bytes for phase in phases(cast, engine) if phase.name not in ("rollout", "sync"))
            if needed <= (1 - HEADROOM) * card or not trainer.fits:
                return found
            left -= max(round(needed - (1 - HEADROOM) * card), _GIB)
        return found

    def _engine(self, tp: int, apart: int, share: float) -> ServingBudget | None:
        request = self.request
        copies = (apart or self.cluster.gpus) // tp
        samples = min(-(-request.samples // copies), _MOST_SEQS)
        asked = ServingConfiguration(
            engine="tonnage" if request.engine == "tonnage" else "vllm", tp=tp, context=request.seq, users=1,
            weights=request.training.base if request.training.base == "nf4" else "", utilization=share,
            max_seqs=samples, batched_tokens=max(_BATCHED_TOKENS, samples), eager=request.eager,
        )  # fmt: skip
        try:
            return serving_budget(self.shape, asked, self.cluster.gpu)
        except (BadLayout, RequestError) as error:
            self.problem = error
            return None

    def _share_wanted(self, tp: int, apart: int, pool: float) -> float:
        """Return the engine's share, in hundredths, that holds `pool` of all samples at once, or the share asked for."""
        if self.request.utilization is not None:
            return self.request.utilization
        engine = self._engine(tp, apart, _LARGEST_SHARE)
        if engine is None:
            return _LARGEST_SHARE
        copies = (apart or self.cluster.gpus) // tp
        samples = min(-(-self.request.samples // copies), engine.configuration.max_seqs)
        blocks = Rollout.blocks(engine, self.request) * max(1, round(pool * samples)) + 2
        layout = engine.kv.layout.bytes_per_block
        wanted = engine.limit_bytes - engine.kv.blocks * layout + blocks * layout
        return min(-(-wanted * 100 // engine.capacity_bytes) / 100, _LARGEST_SHARE)

    def _trainer(self, cluster: Cluster, left_bytes: int) -> TrainingPlan | None:
        """Return the fastest trainer that fits, or the one closest to fitting."""
        # To a hundredth of the card: options that differ by less share a trainer.
        grain = self.cluster.gpu.memory_bytes // 100
        left = left_bytes // grain
        if left * grain < _LEAST_BYTES:
            return None
        key = cluster.gpus, left
        if key not in self._trainers:
            smaller = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=left * grain))
            try:
                self._trainers[key] = search(self.shape, smaller, self._training, self.clock(self.shape, cluster))
            except (BadLayout, RequestError) as error:
                self.problem, self._trainers[key] = error, None
        found = self._trainers[key]
        return found.closest if found else None

    def clock(self, shape: ModelShape, cluster: Cluster) -> StepClock:
        """Return the clock of a model on these GPUs."""
        key = id(shape), cluster.gpus
        if key not in self._clocks:
            self._clocks[key] = StepClock(shape, cluster)
        return self._clocks[key]

    def _time_s(self, phase: Phase, cluster: Cluster, cast: Cast, engine: ServingBudget, made: Rollout | None) -> float:
        """Return the seconds of one phase on the trainer's GPUs, with its transfers between GPU and host."""
        if phase.name == "rollout":
            return made.seconds if made else 0.0
        shares, host = calibration(), cluster.host_link_bytes_per_s * calibration().host_link_ceiling
        if phase.name == "sync":
            # Gather weights, or send them to the engine's GPUs, and write them once. Waking from sleep level 1 first loads the
            # old ones from the host.
            mine = engine.ledger[Category.PARAMETERS]
            seconds = 2 * mine / self.cluster.gpu.bandwidth_bytes_per_s
            if cast.training.shards_parameters or cast.apart:
                weights = self.shape.parameters * cast.training.compute_bytes
                cards = self.cluster.gpus if cast.apart else cluster.gpus
                seconds += weights / (self.cluster.link_bytes_per_s(cards) * shares.link_ceiling)
            if cast.sleep == 1 and engine.configuration.engine == "vllm":
                seconds += 2 * mine / host
            if "weights" in cast.offload:
                kept = [one for one in phase.held if one.owner == "actor" and one.term.category is Category.PARAMETERS]
                seconds += sum(one.size_bytes for one in kept) / host
            return seconds
        # States are loaded before training and offloaded after; read-only weights are only loaded. Idle models have
        # nothing offloaded on the card.
        size = sum(one.size_bytes for one in phase.held if away(one) in cast.offload)
        moved = size * (2 if phase.name.startswith("train") else 1) / host
        step = self.clock(self._valued.get(phase.name) or self.shape, cluster).step(cast.training)
        if phase.name.startswith("train"):
            return float(step.total_s) * self.request.iterations + moved
        # A pass over all samples; sharded parameters are gathered once, of three times in a step.
        return float(step.parts["forward"]) + float(step.parts["collectives"]) / 3 + moved

    @cached_property
    def _valued(self) -> dict[str, ModelShape | None]:
        """The models with one output, by phase."""
        reward, critic = (model and valued(model) for model in (self.request.reward, self.request.critic))
        return {"reward": reward, "values": critic, "train critic": critic}


def away(one: Held) -> str:
    """Return the name under which it is offloaded, or ""."""
    if one.term.category is Category.OPTIMIZER_STATES:
        return "optimizer"
    if one.term.category is not Category.PARAMETERS or one.owner == "engine" or one.term.name == "gathered parameters":
        return ""
    return "weights" if one.owner in ("actor", "critic") else "frozen"


def _remedies(shape: ModelShape, cluster: Cluster, request: RlRequest, closest: RlPlan) -> Iterator[tuple[str, RlPlan]]:
    """Yield single flags that make it fit, the mildest first. In a flag, `{}` stands for the value found."""
    training, whole = request.training, not request.training.lora_rank
    trials: list[tuple[str, RlRequest, Cluster]] = []
    for name in _RELEASED:
        if getattr(request, name) is not None:
            released: dict[str, Any] = {name: None}
            trials.append((f"--{name.replace('_', '-')} {{}}", replace(request, **released), cluster))
    for name in _RELEASED_OF_TRAINING:
        if getattr(training, name) is not None:
            released = {name: None}
            changed = replace(training, **released)
            trials.append((f"--{name.replace('_', '-')} {{}}", replace(request, training=changed), cluster))
    if all(demand.part in ("host", "loading on the host") for demand in closest.shortages):
        needed_gib = ceil(max(demand.needed_bytes for demand in closest.shortages) / _GIB)
        larger = cluster.with_host(memory_bytes=needed_gib * _GIB)
        trials.append((f"--host-memory {needed_gib}g", request, larger))
    narrower = whole and training.precision != "bf16" and cluster.gpu.has_bf16
    quantizes = not whole and training.base == "16-bit" and request.engine == "vllm"
    changes: list[tuple[bool, str, TrainingRequest]] = [
        (whole and training.optimizer == "adamw", "--optimizer adamw-8bit", replace(training, optimizer="adamw-8bit")),
        (narrower, "--precision bf16", replace(training, precision="bf16")),
        (whole, "--lora 16", replace(training, lora_rank=16)),
        (quantizes, "--base nf4", replace(training, base="nf4")),
    ]
    trials += [(flag, replace(request, training=changed), cluster) for applies, flag, changed in changes if applies]
    if whole and request.reference == "copy":
        # The reference of adapters is the base without them.
        *trials, (flag, adapted, _) = trials
        trials.append((flag, replace(adapted, reference="adapters-off"), cluster))
    for times in (2, 4, 8):
        larger = replace(cluster, gpus_per_host=min(cluster.gpus * times, 8), hosts=max(cluster.gpus * times // 8, 1))
        trials.append((f"--gpus {larger.gpus}x{larger.gpu.key}", request, larger))
    for flag, trial, cards in trials:
        with suppress(TonnageError):
            best = _ranked(shape, cards, trial)[0]
            if best.fits:
                yield flag.format(_value(best, flag)), best
                if flag.startswith("--gpus"):
                    return


def _value(plan: RlPlan, flag: str) -> object:
    """Return what a plan chose for a flag of the command."""
    name = flag.removeprefix("--").partition(" ")[0].replace("-", "_")
    values: dict[str, object] = {
        "offload": ",".join(OFFLOAD_NAMES[part] for part in MOVABLE if part in plan.cast.offload) or "none",
        "engine_tp": plan.engine.configuration.tp,
        "utilization": f"{plan.utilization:g}",
        "rollout_gpus": plan.rollout_gpus,
        "micro_batch": plan.trainer.configuration.samples,
    }
    return values[name] if name in values else getattr(plan.trainer.configuration, name, "")
